from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.lanes.metadata import MAX_BYTES, flatten, unflatten
from pierhead.lanes.window import WINDOW_BYTES, ReceiveWindow, SendWindow, cost

SIZES = st.one_of(st.integers(0, 300), st.integers(0, 4 * WINDOW_BYTES))


@given(
    sizes=st.lists(SIZES, max_size=60),
    choices=st.lists(st.integers(0, 2), max_size=400),
    window=st.sampled_from([1, 100, WINDOW_BYTES]),
)
def test_a_stream_never_holds_more_than_a_window_and_a_message_and_never_stops_for_good(
    sizes: list[int], choices: list[int], window: int
) -> None:
    sender, receiver = SendWindow(window), ReceiveWindow(window)
    to_send, held, credits_on_the_way = list(sizes), list[int](), list[int]()

    def send() -> bool:
        if not to_send or not sender.open:
            return False
        size = to_send.pop(0)
        sender.spend(size)
        assert receiver.arrive(size), "the receiver took an announced message for a breach"
        held.append(size)
        assert sum(map(cost, held)) <= window + cost(size)
        return True

    def consume() -> bool:
        if not held:
            return False
        credit = receiver.consume(held.pop(0))
        if credit:
            credits_on_the_way.append(credit)
        return True

    def deliver() -> bool:
        if not credits_on_the_way:
            return False
        sender.earn(credits_on_the_way.pop(0))
        return True

    for choice in choices:
        (send, consume, deliver)[choice]()
    while to_send:
        assert send() or consume() or deliver(), "nobody can continue, and there is more to send"


def test_sending_without_the_right_to_is_noticed() -> None:
    receiver = ReceiveWindow(100)
    assert receiver.arrive(200)
    assert not receiver.arrive(1)


KEYS = st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True)
PRINTABLE = st.characters(min_codepoint=0x20, max_codepoint=0x7E)
PAIRS = st.lists(
    st.one_of(
        st.tuples(KEYS.filter(lambda key: not key.endswith("-bin")), st.text(PRINTABLE)),
        st.tuples(KEYS.map(lambda key: f"{key}-bin"), st.binary()),
    )
)


@given(PAIRS)
def test_metadata_comes_out_as_it_went_in(pairs: list[tuple[str, str | bytes]]) -> None:
    assert list(unflatten(flatten(pairs))) == pairs


@pytest.mark.parametrize("value", ["\x1f", "a\nb", "\xe4", "\udc80", b"\xff", "x" * MAX_BYTES, 5, None])
def test_metadata_that_cannot_be_sent_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        flatten([("key", value)])
