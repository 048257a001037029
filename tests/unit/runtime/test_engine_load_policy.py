"""The less busy of two, by what engines say."""

from __future__ import annotations

from collections import Counter
from random import Random

from pierhead.policies.engine_load import EngineLoad

from tests.unit.runtime.test_policies import CALL, Fake, candidates


def replica(name: str, load: int, **stats: float) -> Fake:
    return Fake(name, load, stats=stats)


def test_requests_that_run_and_wait_count_not_calls() -> None:
    of = [replica("a", 1, running=8, waiting=2), replica("b", 3, running=3, waiting=0)]
    assert {EngineLoad(Random(seed)).choose(of, CALL).name for seed in range(20)} == {"b"}


def test_of_equally_busy_ones_the_one_with_more_free_cache() -> None:
    of = [replica("a", 3, running=3, kv_use=0.9), replica("b", 3, running=2, waiting=1, kv_use=0.2)]
    assert {EngineLoad(Random(seed)).choose(of, CALL).name for seed in range(20)} == {"b"}


def test_without_their_word_it_is_power_of_two() -> None:
    of = candidates([4, 2])
    assert {EngineLoad(Random(seed)).choose(of, CALL).name for seed in range(20)} == {of[1].name}
    one = [replica("a", 2, tokens=7.0), replica("b", 1)]
    assert EngineLoad(Random(1)).choose(one, CALL).name == "b", "other numbers mean nothing to it"


def test_calls_that_came_since_count_on_top() -> None:
    """The word of the idle one is old: while it stays the same, calls must not all go there."""
    policy, said, loads = EngineLoad(Random(1)), {name: {"running": 10.0} for name in "abcd"}, dict.fromkeys("abcd", 10)
    said["d"], loads["d"] = {"running": 0.0}, 0
    for _ in range(30):
        of = [Fake(name, loads[name], stats=said[name]) for name in "abcd"]
        loads[policy.choose(of, CALL).name] += 1
    assert max(loads.values()) - min(loads.values()) <= 4, loads


def test_several_callers_that_hear_the_same_do_not_rush_to_the_idle_one() -> None:
    """Twenty callers, none of which knows of the others' calls; one replica said that it was idle."""
    said = {name: {"running": 10.0} for name in "abcdefgh"} | {"h": {"running": 0.0}}
    sent: Counter[str] = Counter()
    for caller in range(20):
        policy, loads = EngineLoad(Random(caller)), dict.fromkeys(said, 0)
        for _ in range(8):
            chosen = policy.choose([Fake(name, loads[name], stats=said[name]) for name in said], CALL).name
            loads[chosen] += 1
            sent[chosen] += 1
    assert sent["h"] / sent.total() < 0.35, "a quarter is what two draws give it at most"
