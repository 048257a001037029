"""What a handle prefers before its policy chooses."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from pierhead.routing import Router, for_model, near

from tests.unit.runtime.test_policies import CALL, Fake, FakeCall

MODELS = st.sampled_from(["", "a", "b", "c"])

worlds = st.lists(
    st.tuples(st.sampled_from(["", "left", "right"]), st.sets(MODELS.filter(bool))), min_size=1, max_size=8
)


def replicas(world: list[tuple[str, set[str]]]) -> list[Fake]:
    return [Fake(f"r{n}", 0, frozenset(models), node) for n, (node, models) in enumerate(world)]


@given(worlds)
def test_near_ones_when_there_are_any_else_all(world: list[tuple[str, set[str]]]) -> None:
    of = replicas(world)
    left = [replica for replica in of if replica.node == "left"]
    assert near(of, "left") == (left or of)


@given(worlds, MODELS.filter(bool))
def test_holders_when_there_are_any_else_one_with_the_fewest_models(
    world: list[tuple[str, set[str]]], model: str
) -> None:
    of = replicas(world)
    holders = [replica for replica in of if model in replica.models]
    found = for_model(of, model)
    if holders:
        assert found == holders
    elif not any(replica.models for replica in of):
        assert found is of, "not multiplexed: the policy chooses as ever"
    else:
        (one,) = found
        assert len(one.models) == min(len(replica.models) for replica in of)
        assert for_model(list(reversed(of)), model) == [one], "callers agree, in whatever order they know them"


def test_models_are_spread_over_those_that_have_room_for_them() -> None:
    of = replicas([("", {"x"})] * 4)
    chosen = {for_model(of, f"model-{number}")[0].name for number in range(50)}
    assert chosen == {"r0", "r1", "r2", "r3"}


def test_a_handle_prefers_near_ones_only_where_it_was_told_to() -> None:
    of = replicas([("left", set()), ("right", set())])
    everywhere, here = Router("round_robin", Random(1)), Router("round_robin", Random(1), prefer_local=True)
    for router in (everywhere, here):
        router.node = "right"
    assert [everywhere.choose(of, CALL).name for _ in range(4)] == ["r0", "r1", "r0", "r1"]
    assert [here.choose(of, CALL).name for _ in range(4)] == ["r1"] * 4
    assert here.choose(of[:1], CALL).name == "r0", "the near one is full: it is no candidate"
    here.node = ""
    assert {here.choose(of, CALL).name for _ in range(4)} == {"r0", "r1"}, "nobody knows what is near"


def test_a_model_s_calls_go_to_the_replica_that_holds_it() -> None:
    of = replicas([("", {"a"}), ("", {"b"})])
    router = Router("round_robin", Random(1))
    assert [router.choose(of, FakeCall(model_id="b")).name for _ in range(3)] == ["r1"] * 3
    assert {router.choose(of, CALL).name for _ in range(2)} == {"r0", "r1"}
