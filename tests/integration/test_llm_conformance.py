"""Clients of language models against gateway and LLM server, with the mock engine: they take answers, streams and
errors. OpenAI's is asked here, the others in an environment of their own. And what `vllm serve` answers by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from pierhead import Settings, close_handles
from pierhead.calls.clients import Clients
from pierhead.llm.gateway.app import make_app
from pierhead.llm.gateway.metrics import GatewayMetrics
from pierhead.llm.gateway.models.model_map import VARIABLE, read_models
from pierhead.llm.gateway.settings import GatewaySettings
from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.server.engine import LLMEngine
from pierhead.llm.server.llm_server import LLMServer
from pierhead.llm.server.service import LLMService
from pierhead.llm_config import LLMConfig, ModelLoading

from tests.environments import vllm
from tests.environments.llama_cpp import LLAMA_CPP
from tests.harness.llama_cpp_server import CONTEXT, llama_cpp
from tests.harness.llm_clients import ask_clients, needs_clients
from tests.harness.messages_engine import MessagesEngine
from tests.harness.stack import free_ports
from tests.harness.vllm_processes import STARTED_WITHIN_S, is_ready, process
from tests.harness.waiting import seconds_until
from tests.unit.runtime.harness import Cluster, address, until
from tests.unit.services.test_llm_gateway_api import ROWS, ask

MODELS = {"qwen": "llm-qwen", "default": {"alias_of": "qwen"}, "slow": "llm-slow", "away": "llm-away"}
SOON_S = 60.0
"""For what has to happen, however long it takes."""
SLOW = {"request_tokens_per_s": 20, "answer_tokens": 1000}
ASK: list[Any] = [
    {"role": "system", "content": "You are a guide."},
    {"role": "user", "content": "What is the capital of France?"},
]
SCRIPT = [
    {"when": "What is the weather", "text": '{"city": "Paris", "days": 3}', "tool": "get_weather"},
    {"when": "Look up", "text": '{"city": "Paris", "sure": true}', "tool": "look_up"},
    {"when": "as JSON", "text": '{"city": "Paris", "sure": true}'},
]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


def llm(model_id: str, tmp_path: Path, engines: list[MockEngine], **engine_kwargs: Any) -> LLMService:
    def make(config: LLMConfig) -> LLMEngine:
        engines.append(MessagesEngine(config))
        return engines[-1]

    config = LLMConfig(
        engine="mock",
        model_loading=ModelLoading(model_id=model_id),
        engine_kwargs={"tokens_per_s": 1e6, "max_model_len": 2048, "script": SCRIPT} | engine_kwargs,
    )
    return LLMService(config, make_server=partial(LLMServer, engine_cls=make, cache=tmp_path))


class Stack:
    """A gateway with two services behind it, and the client."""

    def __init__(self, client: AsyncOpenAI, metrics: GatewayMetrics, running: Callable[[], float]) -> None:
        self.client = client
        self.metrics = metrics
        self.running = running
        """Requests that the engine of `slow` works on."""


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    engines: list[MockEngine] = []
    services = {model: llm(model, tmp_path, engines, **kwargs) for model, kwargs in {"qwen": {}, "slow": SLOW}.items()}
    async with (
        gateway_of(services) as (url, metrics),
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield Stack(client, metrics, lambda: engines[1].load().running)


@contextlib.asynccontextmanager
async def gateway_of(services: dict[str, LLMService]) -> AsyncIterator[tuple[str, GatewayMetrics]]:
    """A gateway before services: its URL and what it counts."""
    cluster = Cluster()
    replicas = {f"LLM_{model.upper()}": (address(await cluster.start(each)),) for model, each in services.items()}
    Clients.use(Settings(static=replicas))
    metrics = GatewayMetrics()
    app = make_app(GatewaySettings(read_models({VARIABLE: json.dumps(MODELS)})), metrics)
    gateway = await cluster.start(app, service="gateway")
    yield f"http://127.0.0.1:{gateway.http_port}", metrics
    await close_handles()
    await cluster.close()


async def test_a_stream_says_what_the_whole_answer_says(stack: Stack) -> None:
    create = stack.client.chat.completions.create
    whole = await create(model="default", messages=ASK, max_completion_tokens=40)
    assert (whole.model, whole.choices[0].message.role, whole.choices[0].finish_reason) == (
        "qwen",
        "assistant",
        "length",
    )
    options: Any = {"include_usage": True}
    stream = await create(model="qwen", messages=ASK, max_completion_tokens=40, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert stack.metrics.requests.values == {("qwen", "llm-qwen", "", "200", "length"): 2}
    assert stack.metrics.tokens.values[("qwen", "llm-qwen", "completion", "")] == 80
    assert stack.metrics.tokens.values[("qwen", "llm-qwen", "prompt", "")] == 2 * whole.usage.prompt_tokens


async def test_tools_whole_and_streamed(stack: Stack) -> None:
    create = stack.client.chat.completions.create
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = await create(model="qwen", messages=asked, tools=[TOOL], tool_choice="required")
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 3}
    stream = await create(model="qwen", messages=asked, tools=[TOOL], tool_choice="required", stream=True)
    calls = [call async for chunk in stream if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function is not None
    assert calls[0].function.name == "get_weather"
    told = "".join(call.function.arguments or "" for call in calls if call.function is not None)
    assert told == call.function.arguments
    more: list[Any] = [*asked, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    again = await create(model="qwen", messages=more, tools=[TOOL], max_tokens=5)
    assert again.choices[0].message.content


async def test_models_and_embeddings(stack: Stack) -> None:
    model = await stack.client.models.retrieve("default")
    assert (model.id, model.object, model.owned_by) == ("default", "model", "pierhead")
    one = await stack.client.embeddings.create(model="qwen", input=["hello", "world"])  # in base64, as it asks for
    two = await stack.client.embeddings.create(model="qwen", input="hello", encoding_format="float")
    assert [item.index for item in one.data] == [0, 1]
    assert one.data[0].embedding == pytest.approx(two.data[0].embedding, abs=1e-6)


# ---- errors


async def test_errors_are_the_clients_own_classes(stack: Stack) -> None:
    create = stack.client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-4", messages=ASK)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    wrong: list[dict[str, Any]] = [{"max_tokens": -1}, {"temperature": 9}, {"n": 0}, {"stop": 5}]
    for members in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model="qwen", messages=ASK, **members)
        assert refused.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError):
            await create(model="qwen", messages=ASK, stream=True, **members)
    with pytest.raises(openai.BadRequestError) as long:
        await create(model="qwen", messages=[{"role": "user", "content": "word " * 5000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await stack.client.post("/nothing", cast_to=object, body={"model": "qwen"})
    assert (await create(model="qwen", messages=ASK, max_tokens=1)).choices, "and the engine still serves"


async def test_no_replica_and_no_time_left(stack: Stack) -> None:
    client = stack.client
    soon = {"x-request-timeout-seconds": "1"}
    with pytest.raises(openai.InternalServerError) as nobody:
        await client.chat.completions.create(model="away", messages=ASK, extra_headers=soon)
    assert (nobody.value.status_code, nobody.value.code) == (503, "no_replica")
    assert nobody.value.response.headers["Retry-After"] == "1"
    with pytest.raises(openai.InternalServerError) as late:
        await client.chat.completions.create(model="slow", messages=ASK, extra_headers=soon)
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model="slow", messages=ASK, timeout=0.2)
    await until(lambda: stack.running() == 0, "the engine has aborted the requests of clients that left", SOON_S)


@pytest.mark.long
@needs_clients
async def test_other_clients_take_all_of_it(stack: Stack) -> None:
    url = str(stack.client.base_url).removesuffix("/v1/")
    served = {"url": url, "chat": "qwen", "embeddings": "qwen"}
    summary = await asyncio.to_thread(ask_clients, served)
    assert "skipped" not in summary, "all of it ran"


@pytest.mark.long
@needs_clients
@pytest.mark.skipif(not LLAMA_CPP.is_made(), reason="no llama.cpp; python -m tests.environments.llama_cpp makes it")
async def test_other_clients_take_what_llama_cpp_answers(tmp_path: Path) -> None:
    with llama_cpp("small") as behind:
        config = LLMConfig(
            engine="openai", model_loading=ModelLoading(model_id="qwen"),
            engine_kwargs={"base_url": behind, "model": "small", "max_model_len": CONTEXT},
        )  # fmt: skip
        service = LLMService(config, make_server=partial(LLMServer, cache=tmp_path))
        async with gateway_of({"qwen": service}) as (url, _):
            served = {"url": url, "chat": "qwen", "no_tools": "the template of this model has none"}
            await asyncio.to_thread(ask_clients, served)


# ---- `vllm serve` itself

BARE = ("--served-model-name=qwen", "--enforce-eager", "--max-model-len=2048", "--dtype=float32", "--host=127.0.0.1")
ONE_MODEL = "it serves one model, and so does a gateway that serves one"
KIND = "it has the paths of the kind of its model; the gateway serves models of all kinds"
DIFFERENT = {
    **dict.fromkeys(("no model", "model null", "model empty"), (200, ONE_MODEL)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "another method of what is passed on"), (404, KIND)),
    **dict.fromkeys(("/classify", "/v1/classify", "/pooling", "/v1/pooling", "score"), (404, KIND)),
    "a form without a model": (404, KIND),
    **{f"invoked with {what}": (400, KIND) for what in ("inputs", "texts", "documents")},
    "tokens": (404, "the gateway has it below /v1 as well"),
}
"""The status of `vllm serve` where it is another one, and why."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a bare `vllm serve` with the small chat model."""
    [port] = free_ports(1)
    log = tmp_path_factory.mktemp("bare") / "log"
    serve = ("vllm.entrypoints.cli.main", "serve", f"{vllm.MODELS}/smollm2", f"--port={port}", *BARE)
    with process(vllm.VLLM.python, log, *serve, "--gpu-memory-utilization=0.15") as running:
        seconds_until(partial(is_ready, running, port, "/health"), "vllm serve", STARTED_WITHIN_S)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.long
@pytest.mark.skipif(not vllm.VLLM.is_made(), reason="no vLLM here; python -m tests.environments.vllm makes it")
@pytest.mark.timeout(STARTED_WITHIN_S + 300)
@pytest.mark.parametrize("name", ROWS)
async def test_vllm_itself_answers_as_the_gateway_does(bare: str, name: str) -> None:
    row = ROWS[name]
    if isinstance(row.body, dict):
        row = replace(row, body={"max_tokens": 8} | row.body)
    async with aiohttp.ClientSession() as client:
        status, body, headers = await ask(client, bare, row)
    expected, _ = DIFFERENT.get(name, (row.status, ""))
    assert (status, headers.get("Location", "").removeprefix(bare)) == (expected, row.location), body
    if status >= 400:
        told = json.loads(body)
        assert set(told) == {"detail"} or told["error"]["code"] == status, "words of its own; ours are OpenAI's"
