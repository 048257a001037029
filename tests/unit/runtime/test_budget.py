from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pierhead.calls.budget import RetryBudget


def test_three_a_second_without_any_traffic() -> None:
    budget = RetryBudget(now=0)
    assert [budget.spend(0) for _ in range(4)] == [True, True, True, False]
    assert [budget.spend(1) for _ in range(4)] == [True, True, True, False]


def test_a_tenth_of_the_calls() -> None:
    budget = RetryBudget(now=0)
    while budget.spend(0):
        pass
    for _ in range(500):
        budget.called()
    granted = 0
    while budget.spend(0):
        granted += 1
    assert 49 <= granted <= 51


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 2)), max_size=40))
def test_retries_never_exceed_the_share_and_the_floor(steps: list[tuple[int, int, float]]) -> None:
    now, calls, granted = 0.0, 0, 0
    budget = RetryBudget(now)
    for called, asked, seconds in steps:
        now += seconds
        for _ in range(called):
            budget.called()
        calls += called
        granted += sum(budget.spend(now) for _ in range(asked))
    assert granted <= RetryBudget.PER_SECOND * (now + 1) + RetryBudget.SHARE * calls + 1e-6
