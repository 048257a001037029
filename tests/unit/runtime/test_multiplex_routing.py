"""Which replicas a call for a model prefers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.policies.model_holders import prefer_holders


@dataclass(frozen=True)
class Replica:
    name: str
    models: frozenset[str]


def replica(name: str, *models: str) -> Replica:
    return Replica(name, frozenset(models))


@pytest.mark.parametrize(
    ("candidates", "preferred"),
    [
        pytest.param([replica("1", "x"), replica("2", "a"), replica("3", "a", "b")], ["2", "3"], id="holders"),
        pytest.param([replica("1", "x", "y"), replica("2", "x"), replica("3", "z")], ["2", "3"], id="fewest models"),
        pytest.param([replica("1"), replica("2")], ["1", "2"], id="nothing multiplexed"),
        pytest.param([replica("1", "x")], ["1"], id="the only one"),
        pytest.param([], [], id="none"),
    ],
)
def test_examples(candidates: list[Replica], preferred: list[str]) -> None:
    assert [each.name for each in prefer_holders(candidates, "a")] == preferred


@given(st.lists(st.frozensets(st.sampled_from("abc")), max_size=8), st.sampled_from("abc"))
def test_some_of_the_candidates_in_their_order(models: list[frozenset[str]], wanted: str) -> None:
    candidates = [Replica(str(number), each) for number, each in enumerate(models)]
    found = list(prefer_holders(candidates, wanted))
    assert found == [candidate for candidate in candidates if candidate in found]
    assert bool(found) == bool(candidates)
    holders = [candidate for candidate in candidates if wanted in candidate.models]
    assert not holders or found == holders
