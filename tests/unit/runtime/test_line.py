"""The line against a plain list."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pierhead.calls.queue import CallQueue, QueuePlace

steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 5)),
        st.tuples(st.just("leave"), st.integers(0, 100)),
        st.tuples(st.just("serve"), st.just(0)),
    ),
    max_size=80,
)


def place(age: float) -> QueuePlace:
    anything: Any = None
    return QueuePlace(age, anything, anything, anything, anything)


@given(steps)
def test_the_oldest_is_first_while_others_come_and_leave(steps: list[tuple[str, int]]) -> None:
    line = CallQueue()
    model: list[QueuePlace] = []
    joined: list[QueuePlace] = []
    for step, number in steps:
        if step == "join":
            joined.append(place(number))
            model.append(joined[-1])
            model.sort(key=lambda waiting: waiting.age)  # stable: of equal age the first come is first
            line.join(joined[-1])
        elif step == "leave" and joined:
            leaver = joined[number % len(joined)]
            assert line.leave(leaver) is (leaver in model)
            if leaver in model:
                model.remove(leaver)
        elif step == "serve" and model:
            first = line.head()
            assert first is model.pop(0)
            line.leave(first)
        assert line.waiting == len(model)
        assert line.head() is (model[0] if model else None)


def test_those_who_leave_are_not_kept() -> None:
    """Ten thousand give up behind one who stays."""
    line = CallQueue()
    line.join(place(0))
    for number in range(10_000):
        leaver = place(number)
        line.join(leaver)
        line.leave(leaver)
    assert line.waiting == 1
    assert len(line._heap) < 100
