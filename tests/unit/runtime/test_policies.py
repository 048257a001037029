"""Which replica a policy chooses."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.policies.balanced import LeastOngoing, PowerOfTwo, RoundRobin
from pierhead.policies.registry import make_policy, register_policy
from pierhead.policies.session import ConsistentHash

POLICIES = ["power_of_two", "round_robin", "least_ongoing", "consistent_hash", "prefix", "engine_load"]


@dataclass(frozen=True)
class Fake:
    name: str
    load: int
    models: frozenset[str] = frozenset()
    node: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FakeCall:
    session_id: str | None = None
    model_id: str | None = None
    path: str = "/test.Test/Test"
    request: Any = None


CALL = FakeCall()

loads = st.lists(st.integers(0, 50), min_size=1, max_size=12)
seeds = st.integers(0, 2**32)
sessions = st.one_of(st.none(), st.text("abcdef0123456789", min_size=1, max_size=8))


def candidates(numbers: list[int]) -> list[Fake]:
    return [Fake(f"replica-{index:02}", load) for index, load in enumerate(numbers)]


class Drawn(Random):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: list[float] = []

    def random(self) -> float:
        value = super().random()
        self.drawn.append(value)
        return value


@given(loads, seeds, sessions, st.sampled_from(POLICIES))
def test_each_policy_returns_one_of_its_candidates_and_changes_nothing(
    numbers: list[int], seed: int, session: str | None, name: str
) -> None:
    policy, of = make_policy(name, Random(seed)), candidates(numbers)
    for _ in range(5):
        assert policy.choose(of, FakeCall(session)) in of
    assert of == candidates(numbers)


@given(loads, seeds)
def test_power_of_two_never_takes_the_busier_of_the_two_drawn(numbers: list[int], seed: int) -> None:
    rng = Drawn(seed)
    of = candidates(numbers)
    chosen = PowerOfTwo(rng).choose(of, CALL)
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
    counts = Counter(policy.choose(of, CALL).name for _ in range(8000))
    assert len(counts) == 8
    assert all(850 < count < 1150 for count in counts.values()), counts


@given(loads, seeds)
def test_least_ongoing_takes_a_least_loaded_one(numbers: list[int], seed: int) -> None:
    of = candidates(numbers)
    assert LeastOngoing(Random(seed)).choose(of, CALL).load == min(numbers)


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=30))
def test_round_robin_continues_after_the_last_one_while_replicas_come_and_go(rounds: list[set[int]]) -> None:
    policy = RoundRobin(Random(0))
    last = ""
    for present in rounds:
        names = [f"r{number}" for number in sorted(present)]
        chosen = policy.choose([Fake(name, 0) for name in names], CALL).name
        assert chosen == next((name for name in names if name > last), names[0])
        last = chosen


class TestConsistentHash:
    """Every process has a policy object of its own: `mine` and `theirs` must agree."""

    @given(seeds, seeds, sessions.filter(bool))
    def test_callers_agree_on_a_session_s_replica(self, mine: int, theirs: int, session: str) -> None:
        of, call = candidates([0] * 6), FakeCall(session)
        late = ConsistentHash(Random(theirs))
        for index in (5, 2, 4, 0, 3, 1):  # met the replicas one by one
            late.choose([of[index]], CALL)
        assert ConsistentHash(Random(mine)).choose(of, call) is late.choose(of, call)

    @given(loads, seeds, sessions)
    def test_nobody_gets_much_more_than_its_share(self, numbers: list[int], seed: int, session: str | None) -> None:
        of = candidates(numbers)
        chosen = ConsistentHash(Random(seed)).choose(of, FakeCall(session))
        bound = math.ceil(ConsistentHash.BALANCE * (sum(numbers) + 1) / len(of))
        assert chosen.load + 1 <= max(ConsistentHash.NEVER_CROWDED, bound)

    def test_a_session_stays_until_its_replica_is_crowded_and_comes_back(self) -> None:
        policy, call = ConsistentHash(Random(1)), FakeCall("session-1")
        home = policy.choose(candidates([0] * 4), call).name
        index = int(home[-2:])
        calm, crowded, full = candidates([1] * 4), candidates([1] * 4), candidates([1] * 4)
        crowded[index] = Fake(home, 10)
        del full[index]
        assert policy.choose(calm, call).name == home
        second = policy.choose(crowded, call).name
        assert second != home
        assert policy.choose(full, call).name == second, "a second choice of its own"
        assert policy.choose(calm, call).name == home

    def test_calls_without_a_session_are_spread(self) -> None:
        policy = ConsistentHash(Random(1))
        counts = Counter(policy.choose(candidates([0] * 4), CALL).name for _ in range(2000))
        assert all(300 < count < 750 for count in counts.values()), counts


class TestMaking:
    def test_an_unknown_policy_is_refused_with_what_there_is(self) -> None:
        known = "consistent_hash, engine_load, .*least_ongoing, .*"  # others may be made known by then
        expected = rf'policy: expected one of {known}, or package\.module:Class, found "best"'
        with pytest.raises(ValueError, match=expected):
            make_policy("best", Random())

    def test_a_policy_is_registered_once(self) -> None:
        with pytest.raises(ValueError, match="already registered"):
            register_policy("round_robin", RoundRobin)

    def test_a_module_that_is_imported_again_registers_its_policy_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pierhead.policies.registry._REGISTRY", {})

        def module(number: int) -> type:
            class Mine(RoundRobin):
                version = number

            return Mine

        for number in (1, 2):
            register_policy("mine", module(number))
            assert make_policy("mine", Random()).version == number  # type: ignore[attr-defined]

    def test_a_name_that_looks_like_an_import_path_is_refused(self) -> None:
        with pytest.raises(ValueError, match="without a colon"):
            register_policy("my:policy", RoundRobin)

    def test_one_of_the_user_s_own_by_its_import_path(self, own_module: str) -> None:
        rng = Random(1)
        policy: Any = make_policy(f"{own_module}:Last", rng)
        assert policy.rng is rng
        assert policy.choose(candidates([0, 0]), CALL).name == "replica-01"

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("no.such.module:Last", r'the module "no.such.module" cannot be imported: ModuleNotFoundError: No module'),
            (":Last", r'the module "" cannot be imported: ValueError'),
            ("OWN:First", r"expected a class First in .*\.py, found no First; classes with .* there: Last"),
            ("OWN:", r"expected a class  in .*, found no "),
            ("OWN:number", r"found number = 7, which cannot be called"),
            ("OWN:Needy", r"made with one argument, a random.Random, it raised TypeError: .*missing 1 required"),
            ("OWN:Idle", r"expected an object with a method `choose\(candidates, call\)`, found <.*Idle object"),
            ("OWN:Hooked", r"expected a plain method on_routed, found an `async def`, which nothing"),
            ("broken_OWN:Last", r"cannot be imported: ZeroDivisionError"),
        ],
    )
    def test_the_error_for_an_import_path_that_leads_nowhere_names_it(
        self, own_module: str, path: str, message: str
    ) -> None:
        path = path.replace("OWN", own_module)
        with pytest.raises(ValueError, match=message) as caught:
            make_policy(path, Random())
        assert str(caught.value).startswith(f'policy "{path}": ')


OWN_MODULE = """
number = 7

class Last:
    def __init__(self, rng):
        self.rng = rng
    def choose(self, candidates, call):
        return candidates[-1]

class Idle:
    def __init__(self, rng):
        pass

class Needy:
    def __init__(self, rng, more):
        pass

class Hooked(Last):
    async def choose(self, candidates, call):
        return candidates[0]
    async def on_routed(self, candidate, call):
        pass
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with policies of a user's own."""
    name = f"own_policies_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN_MODULE)
    (tmp_path / f"broken_{name}.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return name
