"""The mock engine's parts: when tokens come, what is cached, what is answered."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pierhead.llm.mock.arguments import MockArguments
from pierhead.llm.mock.cache import BlockCache, chain_of
from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.mock.schedule import Schedule, Sequence
from pierhead.llm.objects import ChatCompletionRequest
from pierhead.llm.server.service import replies_of
from pierhead.llm.v1.llm_pb2 import LLMReply
from pierhead.llm_config import LLMConfig, ModelLoading

pytestmark = pytest.mark.virtual_time

# ---------------------------------------------------------------------------------------------------------- schedule


def look(world: Schedule, now: float) -> dict[object, int]:
    """Tokens that came since the last look, by owner."""
    return {sequence.owner: count for sequence, count in world.advance(now).items()}


requests = st.lists(
    st.tuples(
        st.floats(0, 5),  # arrival
        st.integers(1, 60),  # prompt
        st.integers(1, 60),  # tokens
        st.one_of(st.none(), st.floats(0, 3)),  # seconds until it is dropped
    ),
    min_size=1,
    max_size=12,
)
looks = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=20)


@settings(deadline=None)
@given(requests, looks, st.integers(1, 4), st.sampled_from([math.inf, 200.0]), st.sampled_from([40, 1000]))
def test_all_get_what_they_asked_for_and_never_faster_than_the_rate(
    wanted: list[tuple[float, int, int, float | None]], steps: list[float], seqs: int, prefill: float, blocks: int
) -> None:
    rate = 100.0
    cache = BlockCache(blocks)
    pace: dict[str, Any] = {"tokens_per_s": rate, "ttft_s": 0.01, "prefill_tokens_per_s": prefill, "step_s": 0.01}
    world = Schedule(MockArguments.model_construct(**pace, max_num_seqs=seqs, block_size=4), cache)
    sequences = {number: Sequence(number, each[1], (), each[2]) for number, each in enumerate(wanted)}
    events = [(each[0], "add", number) for number, each in enumerate(wanted)]
    events += [(each[0] + each[3], "drop", number) for number, each in enumerate(wanted) if each[3] is not None]
    at = 0.0
    for number, step in enumerate(steps):
        events.append((at := at + step, "look", -number))
    got = dict.fromkeys(sequences, 0)
    dropped: set[object] = set()
    for at, what, number in sorted(events):
        for owner, count in look(world, at).items():
            assert owner not in dropped
            got[owner] += count  # type: ignore[index]
        if what == "add":
            world.add(sequences[number], at)
        elif what == "drop":
            world.drop(sequences[number])
            dropped.add(number)
        assert world.running <= seqs
        assert 0 <= cache.use <= 1
        # First tokens come from the prefill, not from the decoding's rate.
        assert sum(got.values()) <= rate * at + len(wanted) + 1e-3
    for owner, count in look(world, 10_000.0).items():
        got[owner] += count  # type: ignore[index]
    for number, sequence in sequences.items():
        assert got[number] == sequence.total or (number in dropped and got[number] <= sequence.total)
    assert (world.running, world.waiting, cache.use) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------------------- cache


@settings(deadline=None)
@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=12), st.integers(0, 3), st.booleans()), max_size=40))
def test_blocks_are_never_lost(steps: list[tuple[str, int, bool]]) -> None:
    cache = BlockCache(6)
    taken = []
    for text, more, give in steps:
        chain = chain_of(text, 2, 0)
        total = math.ceil(len(text) / 2) + more
        if cache.reserve(chain, total) is not None:
            taken.append((chain, total))
        assert 0 <= cache.use <= 1
        if give and taken:
            cache.give(*taken.pop(0))
    for chain, total in taken:
        cache.give(chain, total)
    assert cache.use == 0
    assert cache.reserve((), 6) is not None, "all of it can be had again"


# ------------------------------------------------------------------------------------------------------------ together


async def started(**engine_kwargs: Any) -> MockEngine:
    config = LLMConfig(engine="mock", model_loading=ModelLoading(model_id="m"), engine_kwargs=engine_kwargs)
    engine = MockEngine(config)
    engine.report = lambda *_: None
    await engine.start()
    return engine


async def chat(engine: MockEngine, messages: list[dict[str, str]], **body: Any) -> LLMReply:
    raw = json.dumps({"messages": messages, "max_tokens": 16} | body).encode()
    replies = [reply async for reply in replies_of(engine.chat(ChatCompletionRequest.from_bytes(raw, model="m")))]
    return replies[-1]


async def test_the_next_turn_finds_the_last_one_in_the_cache() -> None:
    engine = await started(tokens_per_s=1e6, block_size=4)
    turns = [{"role": "user", "content": "Tell me of the sea. " * 10}]
    first = await chat(engine, turns)
    assert first.usage.cached_tokens == 0
    turns.append(json.loads(first.data)["choices"][0]["message"])
    turns.append({"role": "user", "content": "And of the wind?"})
    second = await chat(engine, turns)
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    assert known - 4 <= second.usage.cached_tokens <= known, "the answer's own blocks, too"


async def test_a_scripted_answer_takes_the_place_of_made_up_tokens() -> None:
    call = {"when": "weather", "text": '{"city": "Rome"}', "tool": "look_up"}
    engine = await started(script=[{"when": "capital", "text": "Paris, où sinon?"}, call])

    async def choice(content: str, **body: Any) -> Any:
        reply = await chat(engine, [{"role": "user", "content": content}], **body)
        return json.loads(reply.data)["choices"][0]

    told = await choice("What is the capital?")
    assert (told["message"]["content"], told["finish_reason"]) == ("Paris, où sinon?", "stop")
    told = await choice("What is the capital?", max_tokens=1)
    assert (told["message"]["content"], told["finish_reason"]) == ("Pari", "length")
    told = await choice("And the weather?")
    assert told["finish_reason"] == "tool_calls"
    assert told["message"]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"city": "Rome"}'}
    assert len((await choice("Else?"))["message"]["content"]) == 4 * 16, "no entry fits"
