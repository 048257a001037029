"""What a handle prefers before its policy chooses."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.policies.router import PolicyRouter, for_model, near

from tests.unit.runtime.test_policies import CALL, POLICIES, Fake, FakeCall

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
def test_holders_if_there_are_any_else_one_with_the_fewest_models(
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


def test_a_handle_prefers_near_ones_only_with_the_option() -> None:
    of = replicas([("left", set()), ("right", set())])
    everywhere, here = PolicyRouter("round_robin", Random(1)), PolicyRouter("round_robin", Random(1), prefer_local=True)
    for router in (everywhere, here):
        router.node = "right"
    assert [everywhere.choose(of, CALL).name for _ in range(4)] == ["r0", "r1", "r0", "r1"]
    assert [here.choose(of, CALL).name for _ in range(4)] == ["r1"] * 4
    assert here.choose(of[:1], CALL).name == "r0", "the near one is full: it is no candidate"
    here.node = ""
    assert {here.choose(of, CALL).name for _ in range(4)} == {"r0", "r1"}, "nobody knows what is near"


def kind(router: PolicyRouter) -> str:
    return type(router.policy).__name__


class TestFollowing:
    def test_only_a_handle_without_a_policy_follows_the_service(self) -> None:
        own, following = PolicyRouter("round_robin", Random(1)), PolicyRouter("power_of_two", Random(1), follows=True)
        for router in (own, following):
            router.follow("least_ongoing")
        assert [kind(router) for router in (own, following)] == ["RoundRobin", "LeastOngoing"]
        following.follow(None)
        assert kind(following) == "PowerOfTwo"

    def test_one_that_this_image_lacks_is_reported_once_and_the_default_does(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        router = PolicyRouter("power_of_two", Random(1), follows=True)
        router.follow("round_robin")
        for _ in range(2):
            router.follow("nowhere.to_be_found:Policy")
        assert kind(router) == "PowerOfTwo"
        [line] = caplog.messages
        assert line == (
            'x-serve.router of the called service: policy "nowhere.to_be_found:Policy": the module '
            '"nowhere.to_be_found" '
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere'; power_of_two does in its place"
        )
        router.follow("least_ongoing")
        assert kind(router) == "LeastOngoing"

    @given(st.lists(st.sampled_from([None, *POLICIES, "no.such:Policy"]), max_size=12), worlds)
    def test_one_of_the_candidates_is_chosen_for_any_numbers(
        self, told: list[str | None], world: list[tuple[str, set[str]]]
    ) -> None:
        router, of = PolicyRouter("power_of_two", Random(1), follows=True), replicas(world)
        for policy in told:
            router.follow(policy)
            assert router.choose(of, FakeCall("s")) in of
