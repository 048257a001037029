"""Which replica a policy chooses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.policies import LeastOngoing, PowerOfTwo, RoundRobin, make_policy, register_policy
from pierhead.pool import Endpoint, Pool


@dataclass(frozen=True)
class Fake:
    name: str
    load: int


loads = st.lists(st.integers(0, 50), min_size=1, max_size=12)
seeds = st.integers(0, 2**32)


def candidates(numbers: list[int]) -> list[Fake]:
    return [Fake(f"replica-{index:02}", load) for index, load in enumerate(numbers)]


class Drawn(Random):
    """Remembers what was drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: list[float] = []

    def random(self) -> float:
        value = super().random()
        self.drawn.append(value)
        return value


@given(loads, seeds)
def test_power_of_two_never_takes_the_busier_of_the_two_drawn(numbers: list[int], seed: int) -> None:
    rng = Drawn(seed)
    of = candidates(numbers)
    chosen = PowerOfTwo(rng).choose(of)
    if len(of) == 1:
        assert chosen is of[0]
        return
    first = int(rng.drawn[0] * len(of))
    rest = [index for index in range(len(of)) if index != first]
    drawn = (of[first], of[rest[int(rng.drawn[1] * len(rest))]])
    assert chosen in drawn
    assert chosen.load == min(drawn, key=lambda fake: fake.load).load


@pytest.mark.parametrize("name", ["power_of_two", "least_ongoing", "round_robin"])
def test_equals_are_chosen_equally_often(name: str) -> None:
    policy = make_policy(name, Random(1))
    of = candidates([3] * 8)
    counts = Counter(policy.choose(of).name for _ in range(8000))
    assert len(counts) == 8
    assert all(850 < count < 1150 for count in counts.values()), counts


@given(loads, seeds)
def test_least_ongoing_takes_a_least_loaded_one(numbers: list[int], seed: int) -> None:
    of = candidates(numbers)
    assert LeastOngoing(Random(seed)).choose(of).load == min(numbers)


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=30))
def test_round_robin_goes_on_after_the_last_one_whoever_comes_and_goes(rounds: list[set[int]]) -> None:
    policy = RoundRobin(Random(0))
    last = ""
    for present in rounds:
        names = [f"r{number}" for number in sorted(present)]
        chosen = policy.choose([Fake(name, 0) for name in names]).name
        assert chosen == next((name for name in names if name > last), names[0])
        last = chosen


def test_an_unknown_policy_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r'policy: expected one of least_ongoing, .*round_robin, found "best"'):
        make_policy("best", Random())


def test_a_policy_is_registered_once() -> None:
    with pytest.raises(ValueError, match="already registered"):
        register_policy("round_robin", RoundRobin)


class FakeConnection:
    def __init__(self) -> None:
        self.ready = True

    def check(self) -> None: ...

    def open(self, *_: object) -> None: ...

    async def close(self) -> None: ...


worlds = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 4)),
    min_size=1,
    max_size=8,
)


@given(worlds, st.sampled_from(["power_of_two", "round_robin", "least_ongoing"]), seeds)
def test_no_policy_is_shown_a_replica_that_may_not_be_called(
    world: list[tuple[bool, bool, bool, int, int]], policy: str, seed: int
) -> None:
    """Draining by the list, draining by its own word, disconnected, full: none of them is ever taken."""
    pool = Pool("service", lambda *_: FakeConnection(), clock=lambda: 100.0)
    pool.set_endpoints(
        Endpoint(f"r{index}", f"10.0.0.{index}:1", draining, limit)
        for index, (draining, _, _, limit, _) in enumerate(world)
    )
    for replica, (_, refuses, ready, _, inflight) in zip(pool.replicas(), world, strict=True):
        replica.refuses = refuses
        replica.connection.ready = ready
        replica.inflight = inflight
    pool._refresh()
    allowed = {
        f"r{index}"
        for index, (draining, refuses, ready, limit, inflight) in enumerate(world)
        if ready and not draining and not refuses and inflight < limit
    }
    taken = pool.take(make_policy(policy, Random(seed)))
    assert (taken.name in allowed) if taken is not None else not allowed
