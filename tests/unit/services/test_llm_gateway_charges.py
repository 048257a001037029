"""What keys are charged: what they have used, and never less than nothing."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from pierhead.llm.gateway.charges import MAX_KEYS, Charges

TOKENS = st.integers(0, 10**9)
REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), st.none() | TOKENS, TOKENS, st.booleans()), max_size=40)
"""A key; the estimate at the head of the answer, None where it had none; what was used in the end; whether the next one
begins before this one ends."""


@given(REQUESTS)
def test_charges_and_what_is_owed_are_what_was_used(requests: list[tuple[str, int | None, int, bool]]) -> None:
    charges, charged, used = Charges(), Counter[str](), Counter[str]()
    ongoing: list[tuple[str, int, int]] = []
    for key, estimate, tokens, overlaps in requests:
        if estimate is not None:
            now = charges.charge(key, estimate)
            assert now >= 0
            charged[key] += now
        ongoing.append((key, estimate or 0, tokens))
        while ongoing and not overlaps:
            ended, before, after = ongoing.pop()
            charges.owe(ended, after - before)
            used[ended] += after
        for each in "abc":
            estimates = sum(before for name, before, _ in ongoing if name == each)
            assert charged[each] + charges.owed(each) == used[each] + estimates


def test_what_was_charged_too_much_is_taken_off_the_next_charges() -> None:
    charges = Charges()
    assert charges.charge("a", 100) == 100
    charges.owe("a", 30 - 100)
    assert [charges.charge("a", 50), charges.charge("a", 50), charges.charge("b", 50)] == [0, 30, 50]


def test_what_is_kept_is_bounded() -> None:
    charges = Charges()
    for number in range(MAX_KEYS):
        charges.owe(str(number), 1)
    charges.owe("0", 1)
    charges.owe("new", 1)
    assert [charges.owed(key) for key in ("0", "1", "2", "new")] == [2, 0, 1, 1]
