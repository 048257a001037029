"""API keys' limits: no more than the rate, never a wait that is not needed, and OpenAI's headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.llm.gateway.keys.limits import Limits, Refused, duration
from pierhead.llm.gateway.keys.token_bucket import TokenBucket

RATES = st.floats(0.5, 1e6)
STEPS = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000)), max_size=60)


@given(RATES, STEPS)
def test_no_more_than_the_rate_and_a_minutes_worth(per_minute: float, steps: list[tuple[float, int]]) -> None:
    bucket, now, taken = TokenBucket(per_minute, 5.0), 5.0, 0.0
    for pause, amount in steps:
        now += pause
        if bucket.wait_s(amount, now) == 0:
            # One that is larger than the bucket leaves a debt: the bound holds before it was taken.
            assert taken <= bucket.capacity + (now - 5.0) * bucket.rate + 1e-3
            bucket.spend(amount, now)
            taken += amount
    assert bucket.level(now) <= bucket.capacity


@given(RATES, STEPS, st.integers(1, 10_000))
def test_the_wait_is_as_long_as_needed(per_minute: float, steps: list[tuple[float, int]], amount: int) -> None:
    bucket, now = TokenBucket(per_minute, 0.0), 0.0
    for pause, taken in steps:
        now += pause
        bucket.spend(taken, now)
    wait = bucket.wait_s(amount, now)
    assert wait >= 0
    if wait > 1e-3:
        assert bucket.wait_s(amount, now + wait * 0.99) > 0
    assert bucket.wait_s(amount, now + wait * 1.01 + 1e-3) == 0


@given(RATES, STEPS)
def test_what_is_given_back_is_as_if_it_was_never_taken(per_minute: float, steps: list[tuple[float, int]]) -> None:
    used, unused, now = TokenBucket(per_minute, 0.0), TokenBucket(per_minute, 0.0), 0.0
    for pause, amount in steps:
        now += pause
        used.spend(amount, now)
        used.spend(-amount, now)
        assert used.level(now) == pytest.approx(unused.level(now), abs=1e-6)


def test_one_limit_that_refuses_takes_from_none() -> None:
    limits = Limits(2, 100, 0.0)
    assert limits.admit(90, 0.0) is None
    assert limits.admit(20, 0.0) == Refused("tokens", 100, 6.0)
    assert limits.headers(0.0)["x-ratelimit-remaining-requests"] == "1"
    assert limits.admit(10, 0.0) is None
    assert limits.admit(0, 0.0) == Refused("requests", 2, 30.0)


def test_a_request_larger_than_the_limit_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    limits = Limits(None, 60, 0.0)
    assert limits.admit(600, 0.0) is None
    assert limits.headers(0.0) == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "10m0s",
    }
    limits.correct(600, 90, 0.0)
    assert limits.admit(1, 30.0) == Refused("tokens", 60, 1.0)
    assert limits.admit(1, 31.0) is None


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "0s"), (0.017, "17ms"), (0.9996, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s"), (179.5, "3m0s")],
)
def test_durations_are_spelt_as_openai_does(seconds: float, told: str) -> None:
    assert duration(seconds) == told
