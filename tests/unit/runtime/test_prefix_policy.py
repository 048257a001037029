"""Prompts that begin alike go where their beginning was read."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.calls.channel import HandleChannel
from pierhead.llm.v1.llm_pb2 import LLMRequest
from pierhead.policies.prefix import PrefixAware
from pierhead.policies.registry import make_policy
from pierhead.policies.router import PolicyRouter

from tests.unit.runtime.test_policies import Fake, FakeCall, candidates

SYSTEM = f"{Random(1).getrandbits(3072):0768x}"


def ask(text: str, model_id: str | None = None) -> FakeCall:
    return FakeCall(model_id=model_id, request=LLMRequest(routing_text=text))


def prompt(number: int) -> FakeCall:
    return ask(SYSTEM + f"{Random(number).getrandbits(1024):0256x}")


def send(policy: PrefixAware, of: Sequence[Fake], call: FakeCall) -> str:
    chosen = policy.choose(of, call)
    policy.on_routed(chosen, call)
    return chosen.name


class TestAffinity:
    def test_the_one_that_has_read_most_of_it(self) -> None:
        policy, of = PrefixAware(Random(1)), candidates([1] * 8)
        policy.on_routed(of[2], ask(SYSTEM[:400]))
        policy.on_routed(of[5], ask(SYSTEM))
        assert {policy.choose(of, prompt(number)).name for number in range(20)} == {of[5].name}

    def test_of_equals_the_less_loaded_of_two(self) -> None:
        policy, of = PrefixAware(Random(1)), candidates([9, 9, 9, 9, 7])
        for one in of[2:]:
            policy.on_routed(one, ask(SYSTEM))
        counts = Counter(policy.choose(of, prompt(number)).name for number in range(300))
        assert counts[of[4].name] == pytest.approx(200, abs=30), "it wins whenever it is drawn: two times of three"
        assert len(counts) == 2, "of the other two always the same: the prefix need not be at home everywhere"
        assert set(counts) < {one.name for one in of[2:]}

    def test_too_little_is_no_match(self) -> None:
        """Less than a tenth in common: texts spread as if nobody had read anything."""
        policy, of = PrefixAware(Random(1)), candidates([0] * 4)
        counts = Counter(send(policy, of, ask(SYSTEM[:96] + f"{number:0928x}"[::-1])) for number in range(400))
        assert len(counts) == 4
        assert max(counts.values()) < 160

    def test_who_is_gone_has_read_nothing(self) -> None:
        policy, of = PrefixAware(Random(1)), candidates([1] * 8)
        policy.on_routed(of[5], ask(SYSTEM))
        policy.on_replica_gone(of[5].name)
        assert policy._tree.match(SYSTEM) == {}
        assert not policy._places

    def test_prompts_for_different_adapters_have_nothing_in_common(self) -> None:
        policy, of = PrefixAware(Random(1)), candidates([1] * 8)
        policy.on_routed(of[5], ask(SYSTEM, "french"))
        policy.on_routed(of[3], ask(SYSTEM, "german"))
        found = [policy.choose(of, ask(SYSTEM + "x" * 99, model)).name for model in ("french", "german")]
        assert found == [of[5].name, of[3].name]


class TestTheLoadGate:
    def test_then_the_next_best_among_the_others(self) -> None:
        policy, of = PrefixAware(Random(1)), candidates([9, 4, 4, 4])
        policy.on_routed(of[0], ask(SYSTEM))
        policy.on_routed(of[2], ask(SYSTEM[:300]))
        assert policy.choose(of, prompt(1)) is of[2]

    def test_few_calls_are_no_crowd(self) -> None:
        policy, of = PrefixAware(Random(1)), candidates([1, 0, 0, 0])
        policy.on_routed(of[0], ask(SYSTEM))
        assert policy.choose(of, prompt(1)) is of[0]

    @given(st.lists(st.integers(0, 60), min_size=2, max_size=12), st.data())
    def test_no_replica_is_chosen_for_what_it_read_beyond_bounds(self, loads: list[int], data: st.DataObject) -> None:
        policy, of = PrefixAware(Random(1)), candidates(loads)
        for one in data.draw(st.lists(st.sampled_from(of), min_size=1)):
            policy.on_routed(one, ask(SYSTEM))
        bound = max(2, math.ceil(1.25 * (sum(loads) + 1) / len(loads)))
        chosen = policy.choose(of, prompt(1))
        assert chosen.load < bound
        assert chosen.load <= min(loads) + 32


class TestSeveralCallers:
    def test_they_agree_on_a_beginning_that_none_of_them_knows(self) -> None:
        policies = [PrefixAware(Random(seed)) for seed in range(5)]
        of = candidates([3] * 8)
        homes: list[str] = []
        for number in range(40):
            text = f"{Random(number).getrandbits(4096):01024x}"
            found = {send(policy, of, ask(text + f"{seed:0256}")) for seed, policy in enumerate(policies)}
            assert len(found) == 1
            homes += found
        assert len(set(homes)) == 8, "and different beginnings on different ones"

    def test_one_that_comes_moves_only_what_it_takes_over(self) -> None:
        texts = [f"{Random(number).getrandbits(4096):01024x}" for number in range(300)]
        before = {text: PrefixAware(Random(1)).choose(candidates([3] * 8), ask(text)).name for text in texts}
        after = {text: PrefixAware(Random(1)).choose(candidates([3] * 9), ask(text)).name for text in texts}
        moved = [after[text] for text in texts if after[text] != before[text]]
        assert set(moved) == {"replica-08"}
        assert len(moved) < 80


def test_holders_of_the_adapter_come_first_and_of_those_the_one_that_has_read_it() -> None:
    router = PolicyRouter("prefix", Random(1))
    of = [Fake(f"r{number}", 1, frozenset({"french"} if number in (1, 2) else {"german"})) for number in range(4)]
    for number in (0, 2):
        router.routed(of[number], ask(SYSTEM, "french"))
    for number in range(10):
        call = ask(SYSTEM + f"{number:099}", "french")
        assert router.choose(of, call) is of[2], "r0 has read it and does not hold the adapter"
    assert router.choose(of[:2] + of[3:], ask(SYSTEM, "french")) is of[1], "the only holder with room"


@given(st.text(max_size=300), st.lists(st.integers(0, 5), min_size=1, max_size=5), st.one_of(st.none(), st.text()))
def test_any_text_is_routed(text: str, loads: list[int], model: str | None) -> None:
    @dataclass
    class Message:
        routing_text: Any

    policy, of = PrefixAware(Random(1)), candidates(loads)
    for request in (Message(text), Message(text * 2), Message(text.encode()), Message(None)):
        call = FakeCall(model_id=model, request=request)
        chosen = policy.choose(of, call)
        assert chosen in of
        policy.on_routed(chosen, call)


class TestItsSettings:
    def test_they_come_from_the_service(self) -> None:
        router = PolicyRouter("power_of_two", Random(1), follows=True)
        router.follow("prefix", json.dumps({"match_rate_threshold": 0.9, "max_chars": 10_000}))
        assert isinstance(router.policy, PrefixAware)
        assert router.policy._threshold == 0.9
        policy = router.policy
        router.follow("prefix", json.dumps({"match_rate_threshold": 0.9, "max_chars": 10_000}))
        assert router.policy is policy, "told again, it keeps what it remembers"
        router.follow("prefix", "")
        assert router.policy is not policy

    def test_those_that_it_does_not_have_are_reported_and_the_default_does(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        router = PolicyRouter("power_of_two", Random(1), follows=True)
        router.follow("prefix", '{"treshold": 1}')
        (line,) = caplog.messages
        assert 'policy "prefix": made with one argument, a random.Random and policy_kwargs {"treshold": 1}' in line
        assert "power_of_two does in its place" in line

    async def test_or_from_the_handle(self) -> None:
        channel = HandleChannel("llm", policy="prefix", policy_kwargs={"match_rate_threshold": 0.5})
        policy = channel.binding().router.policy
        assert isinstance(policy, PrefixAware)
        assert policy._threshold == 0.5

    @pytest.mark.parametrize(
        ("kwargs", "words"),
        [
            ({"match_rate_threshold": 1.5}, "expected a number from 0 to 1, found 1.5"),
            ({"balance": 1}, "expected finite numbers above 1, and from 1 on, found 1, 32"),
            ({"imbalance_threshold": math.inf}, "expected finite numbers above 1, and from 1 on, found 1.25, inf"),
            ({"max_chars": 10}, "expected 8192, which is one text, or more, found 10"),
        ],
    )
    def test_those_that_cannot_be_are_refused(self, kwargs: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            make_policy("prefix", Random(1), kwargs)
