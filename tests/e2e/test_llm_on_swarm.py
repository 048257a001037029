"""The app of compose/apps/llm.yaml on a Swarm of three nodes, with the mock engine in place of vLLM."""

from __future__ import annotations

import contextlib

import pytest
from openai import OpenAI, Stream
from openai.types.chat import ChatCompletionChunk, ChatCompletionUserMessageParam

from tests.harness.place import TAG
from tests.harness.stack import EVIDENCE, ROOT
from tests.harness.swarm_rig import SwarmRig
from tests.harness.swarm_stack import IMAGES, SwarmStack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]

APP = EVIDENCE / "pierhead-test-llm-swarm.yaml"
MOCK = {
    "pierhead/llm-cpu:": "pierhead/llm-none:",
    ", model_source: /models/smollm2}": "}\n        engine: mock",
    "max_model_len: 2048, enforce": "max_model_len: 2048, request_tokens_per_s: 25} # enforce",
}
HI: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]
TOKENS = 500
"""Of a stream: twenty seconds."""


def test_a_language_model_behind_every_edge_grows_and_shrinks_under_streams() -> None:
    SwarmStack.build()
    EVIDENCE.mkdir(exist_ok=True)
    text = (ROOT / "compose/apps/llm.yaml").read_text()
    for real, mock in MOCK.items():
        text = text.replace(real, mock)
    APP.write_text(text)
    images = [*IMAGES, *(f"pierhead/{name}:{TAG}" for name in ("llm-gateway", "llm-none"))]
    with SwarmRig(nodes=3).running([], only_first=images) as rig:
        stack = SwarmStack(rig, APP.stem, f"compose/compose.yaml:{EVIDENCE.name}/{APP.name}")
        stack.make("up")
        clients = [OpenAI(base_url=f"{edge}/v1", api_key="none", max_retries=0) for edge in stack.edges]
        for client in clients:
            assert {model.id for model in client.models.list()} == {"smollm2", "default"}
            whole = client.chat.completions.create(model="smollm2", messages=HI, max_tokens=8)
            assert whole.choices[0].message.content
            assert tokens_of(stream(client, 8)) == 8

        stack.make("scale", "llm", "2")
        assert len({one["node"] for one in replicas(stack)}) == 2
        assert "NODE" in stack.make("status")
        with contextlib.ExitStack() as open_ones:
            streams = [open_ones.enter_context(stream(client, TOKENS)) for client in clients * 2]
            eventually(lambda: all(one["ongoing"] for one in replicas(stack)), "both replicas work")
            stack.make("scale", "llm", "1")
            assert [tokens_of(each) for each in streams] == [TOKENS] * len(streams)
        eventually(lambda: len(replicas(stack)) == 1, "the other one has gone")

        stack.make("down", "--volumes")
        assert stack.is_gone()


def stream(client: OpenAI, tokens: int) -> Stream[ChatCompletionChunk]:
    return client.chat.completions.create(model="smollm2", messages=HI, max_tokens=tokens, stream=True)


def tokens_of(answer: Stream[ChatCompletionChunk]) -> int:
    return sum(bool(choice.delta.content) for chunk in answer for choice in chunk.choices)


def replicas(stack: SwarmStack) -> list[dict[str, object]]:
    return list(stack.services()["llm"]["replicas"])
