"""The openai engine against servers that behave, and that do not; tests/contract/test_llm_engines.py has the rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as some
from pierhead import Unavailable
from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.objects import ChatCompletionRequest, OpenAIRequest
from pierhead.llm.server.engines.openai import engine as openai_engine
from pierhead.llm.server.engines.openai.engine import OpenAIEngine
from pierhead.llm.server.errors import LLMRequestError, LLMStartError, NotSupported, UpstreamError
from pierhead.llm.server.events import Account, Splitter
from pierhead.llm.server.service import replies_of
from pierhead.llm.v1.llm_pb2 import LLMReply
from pierhead.llm_config import LLMConfig, ModelLoading

from tests.harness.openai_server import Handler, handler_of, serving
from tests.harness.waiting import PATIENCE_S, until


def engine_at(url: str, stall_timeout_s: float = 60.0, **engine_kwargs: Any) -> OpenAIEngine:
    arguments = {"base_url": url, "metrics_path": None, **engine_kwargs}
    loading = ModelLoading(model_id="m")
    engine = OpenAIEngine(
        LLMConfig(engine="openai", model_loading=loading, engine_kwargs=arguments, stall_timeout_s=stall_timeout_s)
    )
    engine.report = lambda *_: None
    return engine


@contextlib.asynccontextmanager
async def started(handler: Handler, stall_timeout_s: float = 60.0, **engine_kwargs: Any) -> AsyncIterator[OpenAIEngine]:
    async with serving(handler) as url:
        engine = engine_at(url, stall_timeout_s, **engine_kwargs)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.shutdown()


def with_models(handler: Handler, *names: str) -> Handler:
    """A server that lists these models, and answers everything else by `handler`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in names or ("m",)]})
        return await handler(request)

    return handle


def saying(*parts: bytes, kind: str = "text/event-stream", status: int = 200, cut: bool = False) -> Handler:
    """A server whose answers are these bytes, each written by itself. `cut`: the connection breaks after them."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": kind})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if cut:
            assert request.transport is not None
            request.transport.close()
        return response

    return with_models(handle)


def ask(**body: Any) -> ChatCompletionRequest:
    members = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body}
    return ChatCompletionRequest.from_bytes(json.dumps(members).encode())


async def all_of(
    engine: OpenAIEngine, request: ChatCompletionRequest, found: list[LLMReply] | None = None
) -> list[LLMReply]:
    """The replies; `found` has them also where it fails."""
    found = [] if found is None else found
    async with asyncio.timeout(20):
        async for reply in replies_of(engine.chat(request)):
            found.append(reply)
    return found


def event(text: str = "", reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice], **more}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


async def test_events_pass_as_they_are_and_usage_only_where_the_client_asked() -> None:
    events = [event("Pa"), event("ris"), event(reason="stop")]
    async with started(saying(*events, LAST, DONE)) as engine:
        replies = await all_of(engine, ask(stream=True))
        assert b"".join(reply.data for reply in replies) == b"".join([*events, DONE])
        assert sum(reply.tokens for reply in replies) == 3, "two events, but three tokens by the server's own count"
        usage = replies[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.finish_reason) == (
            7, 3, 4, "stop",
        )  # fmt: skip
        replies = await all_of(engine, ask(stream=True, stream_options={"include_usage": True}))
        assert b"".join(reply.data for reply in replies) == b"".join([*events, LAST, DONE])


_INPUT = {"input_tokens": 7, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}
_ANTHROPIC = {"input_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 1, "output_tokens": 1}


def named(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n".encode()


RESPONSE_EVENTS = (
    named("response.created", response={"usage": None}),
    named("response.output_text.delta", delta="Pa"),
    named("response.reasoning_text.delta", delta="ris"),
    named("response.completed", response={"output": [{"content": [{"text": "Paris"}]}], "usage": _INPUT}),
)
MESSAGE_EVENTS = (
    named("message_start", message={"content": [], "usage": _ANTHROPIC}),
    named("content_block_delta", delta={"type": "thinking_delta", "thinking": "Pa"}),
    named("content_block_delta", delta={"type": "input_json_delta", "partial_json": "ris"}),
    named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3}),
    named("message_stop"),
)


@pytest.mark.parametrize(
    ("path", "handler", "expected"),
    [
        ("/v1/responses", saying(json.dumps({"usage": _INPUT}).encode(), kind="application/json"), (7, 3, 4)),
        ("/v1/responses", saying(*RESPONSE_EVENTS), (7, 3, 4)),
        (
            "/v1/messages",
            saying(json.dumps({"usage": {**_ANTHROPIC, "output_tokens": 3}}).encode(), kind="application/json"),
            (7, 3, 4),
        ),
        ("/v1/messages", saying(*MESSAGE_EVENTS), (7, 3, 4)),
        ("/v1/rerank", saying(b'{"usage": {"total_tokens": 7}}', kind="application/json"), (7, 0, 0)),
    ],
)
async def test_tokens_of_other_paths_count_whatever_their_names_are(
    path: str, handler: Handler, expected: tuple[int, int, int]
) -> None:
    async with started(handler) as engine:
        request = OpenAIRequest.from_bytes(b'{"model": "m"}', model="m").sent_to(path)
        replies = [reply async for reply in replies_of(engine.pass_through(request))]
    usage = replies[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == expected
    assert sum(reply.tokens for reply in replies) == expected[1]


@pytest.mark.parametrize("events", [RESPONSE_EVENTS, MESSAGE_EVENTS])
def test_tokens_of_other_paths_count_while_they_stream(events: tuple[bytes, ...]) -> None:
    """A client may leave before the event that has the usage."""
    account = Account(hide_usage=False)
    for each in events[:3]:
        account.note(each)
    assert account.tokens >= 2


@pytest.mark.parametrize("end_s", [0.02, 5.0])
async def test_the_last_event_comes_with_the_end_of_the_stream_or_soon(end_s: float) -> None:
    """A client leaves when it has it, and a request that still runs then counts as left."""
    ended: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event("Hi") + LAST + DONE)
        await asyncio.sleep(end_s)
        ended.append(request.path)
        return response

    async with started(with_models(handle)) as engine:
        replies = replies_of(engine.chat(ask(stream=True)))
        assert (await anext(replies)).data.endswith(DONE)
        assert bool(ended) == (end_s < 1)
        with pytest.raises(StopAsyncIteration):
            await anext(replies)
        assert bool(ended) == (end_s < 1), "what never ends is not waited for"


async def test_what_the_server_is_asked() -> None:
    seen: list[tuple[str | None, dict[str, Any]]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers.get("Authorization"), await request.json()))
        return web.json_response({"choices": [], "usage": USAGE})

    server = with_models(handle, "org/big", "org/big:french")
    async with started(server, model="org/big", api_key="secret") as engine:
        await all_of(engine, ask(stream=True, max_tokens=3))
        lora = ask()
        lora.model = "m:french"
        await all_of(engine, lora)
        await engine.generate_one_token()
    (key, first), (_, second), (_, third) = seen
    assert key == "Bearer secret"
    assert (first["model"], first["max_tokens"]) == ("org/big", 3)
    assert first["stream_options"] == {"include_usage": True}
    assert second["model"] == "org/big:french"
    assert (third["model"], third["max_tokens"]) == ("org/big", 1)


async def test_a_client_that_leaves_ends_the_request_there() -> None:
    mock = MockEngine(
        LLMConfig(engine="mock", model_loading=ModelLoading(model_id="m"), engine_kwargs={"tokens_per_s": 50.0})
    )
    mock.report = lambda *_: None
    await mock.start()
    async with started(handler_of(mock)) as engine, asyncio.timeout(20):
        replies = engine.chat(ask(stream=True, max_tokens=10_000))
        await anext(replies)
        assert mock.load().running == 1
        await replies.aclose()
        while mock.load().running:  # noqa: ASYNC110 - an engine's state has no event
            await asyncio.sleep(0.005)
        assert engine.load().running == 0
    await mock.shutdown()


# ---- servers that fail


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (saying(event("Pa"), cut=True), "stopped"),
        (saying(event("Pa")), "in the middle"),
        (saying(event("Pa"), event("ris")[:20]), "in the middle"),
        (saying(event("Pa"), b'data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
        (saying(event("Pa"), b'data: {"finish_reason": "stop"\n\n'), "not JSON"),
    ],
    ids=["dies", "no-done", "half-an-event", "error-event", "garbage"],
)
async def test_a_stream_that_fails_in_the_middle_is_no_whole_answer(server: Handler, told: str) -> None:
    async with started(server) as engine:
        found: list[LLMReply] = []
        with pytest.raises((UpstreamError, Unavailable), match=told):
            await all_of(engine, ask(stream=True), found)
        assert [reply.status for reply in found] in ([200], []), "what came before may be lost with the connection"
        assert engine.load().running == 0


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (saying(b"<html>welcome</html>", kind="text/html"), "not JSON"),
        (saying(b"[]", kind="application/json"), "not a JSON object"),
        (saying(b"", kind="application/json"), "not JSON"),
        (saying(b"elsewhere", status=302), "302"),
        (saying(b'{"error": "no key"}', kind="application/json", status=401), "api_key_env"),
    ],
    ids=["page", "array", "empty", "redirect", "key"],
)
async def test_what_is_no_answer_is_not_passed_on(server: Handler, told: str) -> None:
    async with started(server) as engine:
        with pytest.raises(UpstreamError, match=told):
            await all_of(engine, ask())


async def test_errors_keep_their_status_in_openais_form() -> None:
    own = {"error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": "no"}}
    for raw, status, kind in [
        (json.dumps(own).encode(), 400, "invalid_request_error"),
        (b'{"error": {"message": "too long", "code": "no"}}', 429, "invalid_request_error"),
        (b'{"detail": "too long"}', 422, "invalid_request_error"),
        (b"too long", 503, "server_error"),
    ]:
        async with started(saying(raw, kind="application/json", status=status)) as engine:
            (reply,) = await all_of(engine, ask(stream=True))
            error = json.loads(reply.data)["error"]
            assert reply.status == status
            assert set(error) == {"message", "type", "param", "code"}
            assert "too long" in error["message"]
            assert error["type"] == kind


@pytest.mark.parametrize(
    ("status", "error", "kind", "code"),
    [
        (400, {"code": 400, "message": "the request exceeds the available context size (512 tokens)",
               "type": "exceed_context_size_error", "n_ctx": 512}, "invalid_request_error", "context_length_exceeded"),
        (400, {"message": "This model's maximum context length is 9", "type": "BadRequestError", "param": None,
               "code": 400}, "invalid_request_error", "context_length_exceeded"),
        (404, {"message": "The model `x` does not exist.", "type": "NotFoundError", "param": "model", "code": 404},
         "invalid_request_error", "model_not_found"),
        (404, {"code": 404, "message": "File Not Found", "type": "not_found_error"},
         "invalid_request_error", "not_found"),
        (501, {"code": 501, "message": "no embeddings", "type": "not_supported_error"}, "server_error", None),
        (429, {"message": "slow down", "type": "requests", "param": None, "code": "rate_limit_exceeded"},
         "requests", "rate_limit_exceeded"),
    ],
)  # fmt: skip
async def test_servers_errors_are_in_one_dialect(
    status: int, error: dict[str, Any], kind: str, code: str | None
) -> None:
    raw = json.dumps({"error": error}).encode()
    async with started(saying(raw, kind="application/json", status=status)) as engine:
        (reply,) = await all_of(engine, ask())
    told = json.loads(reply.data)["error"]
    assert (reply.status, told) == (
        status, {"message": error["message"], "type": kind, "param": error.get("param"), "code": code},
    )  # fmt: skip


async def test_answers_carry_the_model_that_the_client_asked_for() -> None:
    said = '"a \\"model\\": \\"-\\""'
    events = [f'data: {{"model": "-", "choices": [{{"delta": {{"content": {said}}}}}]}}\n\n'.encode(), event("b")]
    async with started(saying(*events, DONE)) as engine:
        replies = await all_of(engine, ask(stream=True))
    first, _, _ = b"".join(reply.data for reply in replies).partition(b"\n\n")
    assert json.loads(first.removeprefix(b"data: ")) == {
        "model": "m", "choices": [{"delta": {"content": 'a "model": "-"'}}],
    }  # fmt: skip
    async with started(saying(b'{"model": "-", "choices": []}', kind="application/json")) as engine:
        (reply,) = await all_of(engine, ask())
    assert json.loads(reply.data) == {"model": "m", "choices": []}


async def test_no_error_names_the_servers_address_or_path() -> None:
    async with started(saying(b"no such page", status=404)) as engine:
        (reply,) = await all_of(engine, ask())
    told = json.loads(reply.data)["error"]
    assert told["message"] == "the server behind this model answers with 404: no such page"
    async with started(saying(b"[]", kind="application/json")) as engine:
        with pytest.raises(UpstreamError) as raised:
            await all_of(engine, ask())
    assert raised.value.message == "the server behind this model: its answer is not a JSON object: []"


async def test_a_server_that_is_gone_is_unavailable() -> None:
    async with serving(saying(DONE)) as url:
        engine = engine_at(url)
        await engine.start()
    with pytest.raises(Unavailable, match="the server behind this model cannot be asked") as told:
        await all_of(engine, ask())
    assert "127.0.0.1" not in told.value.message, "clients read it"
    with pytest.raises(Unavailable, match=url):
        await engine.check_health()
    with pytest.raises(Unavailable):
        await engine.generate_one_token()
    await engine.shutdown()
    with pytest.raises(Unavailable, match="shut down"):
        await all_of(engine, ask())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_connection_that_the_server_closes_is_replaced_by_a_new_one(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp closes each connection after a stream, without saying so: the next request may still be written."""
    monkeypatch.setattr(openai_engine, "CLOSED_WITHIN_S", PATIENCE_S)
    used: list[asyncio.Transport | None] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if (transport := request.transport) in used:
            assert transport is not None
            transport.close()
        used.append(transport)
        return await answer(request)

    answer = saying(event("Hi"), LAST, DONE) if stream else saying(b"{}", kind="application/json")
    async with started(with_models(handle)) as engine:
        used.clear()
        for _ in range(3):
            assert await all_of(engine, ask(stream=stream))
    assert len(used) == 5, "three requests, of which two were written to a connection that was closed"


async def test_a_new_connection_that_the_server_closes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_engine, "CLOSED_WITHIN_S", PATIENCE_S)
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            asked.append(request.path)
            assert request.transport is not None
            request.transport.close()
        return web.Response()

    async with started(with_models(handle)) as engine:
        with pytest.raises(Unavailable, match="ServerDisconnected"):
            await all_of(engine, ask())
    assert len(asked) == 2, "by the connection that was kept, and by a new one"


async def test_a_request_that_the_server_may_have_begun_is_not_sent_again() -> None:
    """A connection that was closed before is noticed at once."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            asked.append(request.path)
            await asyncio.sleep(0.5)
            assert request.transport is not None
            request.transport.close()
        return web.Response()

    async with started(with_models(handle)) as engine:
        with pytest.raises(Unavailable, match="ServerDisconnected"):
            await all_of(engine, ask())
    assert len(asked) == 1


async def test_a_servers_cookies_do_not_go_from_one_client_to_another() -> None:
    seen: list[dict[str, str]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(dict(request.cookies))
        response = web.json_response({"choices": []})
        response.set_cookie("session", "of the first client")
        return response

    async with serving(with_models(handle)) as url:
        engine = engine_at(url.replace("127.0.0.1", "localhost"))  # aiohttp has no cookies of addresses
        await engine.start()
        for _ in range(2):
            await all_of(engine, ask())
        await engine.shutdown()
    assert seen == [{}, {}]


async def test_a_server_that_says_nothing_is_given_up() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with started(with_models(handle), read_timeout_s=0.2) as engine:
        with pytest.raises(Unavailable, match="imeout"):
            await all_of(engine, ask())


# ---- its start


async def test_it_waits_for_the_server_and_says_so() -> None:
    states: list[str] = []
    up = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        if not up.is_set():
            return web.Response(status=503, text="loading")
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})

    def report(what: str, *_: float | None) -> None:
        states.append(what)
        if len(states) == 2:
            up.set()

    async with serving(handle) as url:
        engine = engine_at(url)
        async with asyncio.timeout(20):
            engine.report = report
            await engine.start()
        assert states == [f"waiting for {url}"] * 2
        assert engine.describe().max_model_len == 4096
        await engine.shutdown()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"base_url": "sglang:30000"}, "base_url"),
        ({"base_url": "http://x", "url": "y"}, "url"),
        ({"base_url": "http://me:secret@x"}, "without a name and a password; a key belongs into api_key_env"),
        ({"base_url": "http://x", "health_path": "health"}, "health_path"),
        ({}, "base_url"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(LLMStartError, match=told) as caught:
        OpenAIEngine(LLMConfig(engine="openai", model_loading=ModelLoading(model_id="m"), engine_kwargs=arguments))
    assert "secret" not in str(caught.value)


async def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(with_models(saying(), "other")) as url:
        engine = engine_at(f"{url}/v1")
        with pytest.raises(LLMStartError, match='does not serve "m" but other'):
            await engine.start()
        await engine.shutdown()
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        with pytest.raises(LLMStartError, match="NO_SUCH_KEY"):
            await engine_at(url, api_key_env="NO_SUCH_KEY").start()
    engine = engine_at(url, start_timeout_s=0.05)
    with pytest.raises(LLMStartError, match="start_timeout_s"):
        await engine.start()
    await engine.shutdown()


# ---- adapters


class WithAdapters:
    """A server that takes adapters as vLLM's does, with a mock engine in it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.engine = MockEngine(LLMConfig(engine="mock", model_loading=ModelLoading(model_id="m")))

    async def start_anew(self) -> None:
        """As after a crash: what was loaded is not."""
        self.engine = MockEngine(self.engine.config)
        self.engine.report = lambda *_: None
        await self.engine.start()
        self.handler = handler_of(self.engine)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "adapter" in request.path:
            self.asked.append(request.path.removeprefix("/v1/"))
        return await self.handler(request)


@pytest.fixture
async def with_adapters() -> AsyncIterator[WithAdapters]:
    server = WithAdapters()
    await server.start_anew()
    yield server
    await server.engine.shutdown()


def ask_french(**body: Any) -> ChatCompletionRequest:
    request = ask(max_tokens=2, **body)
    request.model = "m:french"
    return request


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_that_the_server_has_lost_is_loaded_again(with_adapters: WithAdapters, stream: bool) -> None:
    async with started(with_adapters.answer) as engine:
        assert (await all_of(engine, ask_french(stream=stream)))[0].status == 404
        await engine.load_adapter("french", "/adapters/french")
        await with_adapters.start_anew()
        replies = await all_of(engine, ask_french(stream=stream))
        assert [reply.status for reply in replies][:1] == [200]
        assert sum(reply.tokens for reply in replies) == 2
        assert with_adapters.asked == ["load_lora_adapter"] * 2
        await with_adapters.start_anew()
        await engine.unload_adapter("french")  # which the server has lost again
        assert list(engine.describe().adapters) == []
        assert (await all_of(engine, ask_french(stream=stream)))[0].status == 404


async def test_a_path_that_the_server_does_not_have_is_no_lost_adapter(
    with_adapters: WithAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    """Any client can ask for such a path: it must not cost a load, a second request and a line in the log."""
    async with started(with_adapters.answer) as engine:
        await engine.load_adapter("french", "/adapters/french")
        with_adapters.asked.clear()
        answers = engine.pass_through(ask_french().sent_to("/v1/rerank"))
        replies = [reply.status async for reply in replies_of(answers)]
    assert replies == [404]
    assert with_adapters.asked == []
    assert not caplog.records


async def test_a_server_may_have_an_adapter_of_a_replica_before(with_adapters: WithAdapters) -> None:
    for path, asked in (
        ("/adapters/one", ["load_lora_adapter"]),
        ("/adapters/one", ["load_lora_adapter"]),
        ("/adapters/two", ["load_lora_adapter", "unload_lora_adapter", "load_lora_adapter"]),
    ):
        with_adapters.asked.clear()
        async with started(with_adapters.answer) as engine:
            await engine.load_adapter("french", path)
            assert with_adapters.asked == asked
            assert (await all_of(engine, ask_french()))[0].status == 200


ANSWERING = saying(b'{"model": "-", "choices": []}', kind="application/json")
"""Whatever the model's name is."""


@pytest.mark.parametrize("listed", [("m", "m:french"), ("m", "french"), ()], ids=["as vLLM", "as SGLang", "no list"])
async def test_a_list_that_has_an_adapter_of_the_server_alone_is_remembered_for_a_while(
    listed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in listed]})
        return await ANSWERING(request)

    monkeypatch.setattr(openai_engine, "LISTED_S", math.inf)
    async with started(handle) as engine:
        asked.clear()
        for _ in range(3):
            assert (await all_of(engine, ask_french()))[0].status == 200
        assert asked == ["/v1/models", *["/v1/chat/completions"] * 3]
        monkeypatch.setattr(openai_engine, "LISTED_S", 0.0)
        assert (await all_of(engine, ask_french()))[0].status == 200
        assert asked[4:] == ["/v1/models", "/v1/chat/completions"], "what it remembers is old"


async def test_a_list_that_lacks_an_adapter_is_asked_for_again() -> None:
    names = ["m"]

    async def handle(request: web.Request) -> web.StreamResponse:
        return await with_models(ANSWERING, *names)(request)

    async with started(handle) as engine:
        assert (await all_of(engine, ask_french()))[0].status == 404
        names.append("m:french")
        assert (await all_of(engine, ask_french()))[0].status == 200


async def test_adapters_that_cannot_be_loaded_say_why() -> None:
    error = {"error": {"message": "No adapter found for /adapters/french", "type": "NotFoundError", "code": 404}}
    for status, answer, kind, words in (
        (404, error, LLMRequestError, "must see at the same path, cannot be loaded: No adapter found for /adapters/fr"),
        (404, {"detail": "Not Found"}, NotSupported, "takes no LoRA adapters while it runs .* with --enable-lora"),
        (500, error, UpstreamError, "answers 500 to the change of an adapter"),
    ):
        raw = json.dumps(answer).encode()
        async with started(saying(raw, kind="application/json", status=status)) as engine:
            with pytest.raises(kind, match=words):
                await engine.load_adapter("french", "/adapters/french")
            assert list(engine.describe().adapters) == []


# ---- what is reported of it


async def test_its_metrics_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    page = [b"# TYPE vllm:x gauge\nvllm:x 1\n# TYPE process_x gauge\nprocess_x 1\n# EOF\n"]

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=page[0])

    monkeypatch.setattr(openai_engine, "WATCH_EVERY_S", 0.01)
    async with started(with_models(handle), metrics_path="/metrics") as engine, asyncio.timeout(20):
        while not engine.expose():  # noqa: ASYNC110 - it is fetched in the background
            await asyncio.sleep(0.005)
        assert engine.expose() == b"# TYPE vllm:x gauge\nvllm:x 1\n"
        page[0] = b"x" * (openai_engine.LARGEST_METRICS + 1)
        monkeypatch.setattr(openai_engine, "METRICS_LAST_S", 0.05)
        while engine.expose():  # noqa: ASYNC110 - too large a page is no news, and the old one grows old
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("every_s", "stall_timeout_s"), [(0.01, 60.0), (5.0, 0.1)], ids=["usual", "impatient"])
async def test_a_long_answer_that_does_not_stream_is_no_stall(
    monkeypatch: pytest.MonkeyPatch, every_s: float, stall_timeout_s: float
) -> None:
    held = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        if (await request.json()).get("max_tokens") != 1:
            await held.wait()
        return web.json_response({"choices": [], "usage": USAGE})

    monkeypatch.setattr(openai_engine, "WATCH_EVERY_S", every_s)
    async with started(with_models(handle), stall_timeout_s) as engine, asyncio.timeout(20):
        answer = asyncio.create_task(all_of(engine, ask()))
        while engine.load().tokens < 10:  # noqa: ASYNC110 - one token now and then proves that the server generates
            await asyncio.sleep(0.005)
        assert engine.load().running >= 1
        held.set()
        assert (await answer)[0].usage.completion_tokens == 3


async def test_a_server_whose_places_are_all_taken_is_alive_while_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp lets the request for one token wait for a place; its count of decoded batches says whether it lives."""
    ended, decodes, calls = asyncio.Event(), asyncio.Event(), count()

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(text=f"llamacpp:n_decode_total {next(calls) if decodes.is_set() else 0}\n")
        await ended.wait()
        return web.json_response({"choices": [], "usage": USAGE})

    monkeypatch.setattr(openai_engine, "WATCH_EVERY_S", 0.01)
    async with started(with_models(handle), metrics_path="/metrics") as engine:
        answer = asyncio.create_task(all_of(engine, ask()))
        await until(lambda: engine.load().running == 2, "the request for one token waits")
        before, seen = engine.load().tokens, engine._metrics_at
        await until(lambda: engine._metrics_at > seen, "the metrics are fetched while it waits")
        assert engine.load().tokens == before, "it may hang"
        decodes.set()
        await until(lambda: engine.load().tokens > before + 2, "it lives")
        assert engine.load().running == 2, "one request for one token at a time"
        ended.set()
        assert (await answer)[0].usage.completion_tokens == 3


async def test_what_the_server_has_decoded_before_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(text="llamacpp:n_decode_total 7\n")

    monkeypatch.setattr(openai_engine, "WATCH_EVERY_S", 0.01)
    async with started(with_models(handle), metrics_path="/metrics") as engine:
        await until(lambda: bool(engine.expose()), "its metrics are fetched")
        assert engine.load().tokens == 0


# ---- events


@given(some.lists(some.integers(1, 50)), some.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_however_events_are_cut_they_come_whole(cuts: list[int], end: bytes) -> None:
    events = [b'data: {"n": %d}' % number + end for number in range(20)]
    text, splitter = b"".join(events), Splitter()
    found: list[bytes] = []
    for cut in cuts:
        found += splitter.feed(text[:cut])
        text = text[cut:]
    found += splitter.feed(text)
    assert b"".join(found) == b"".join(events)
    assert found == events
    assert splitter.rest == b""


def test_a_large_event_in_many_pieces_is_looked_at_once() -> None:
    whole, splitter = event("x" * (4 * 1024 * 1024)), Splitter()
    before = time.process_time()
    found = [each for begin in range(0, len(whole), 1024) for each in splitter.feed(whole[begin : begin + 1024])]
    assert found == [whole]
    assert time.process_time() - before < 10, "with all before it again and again it is minutes of a core"


async def test_only_known_paths_are_passed_on_with_the_operators_key() -> None:
    asked: list[tuple[str, str, str | None]] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append((request.method, request.path, request.headers.get("Authorization")))
        return web.json_response({})

    async with started(with_models(handle), api_key="operators", more_paths=["/v1/own"]) as engine:

        async def status(path: str, body: bytes = b'{"model": "m"}') -> int:
            answers = engine.pass_through(OpenAIRequest.from_bytes(body, model="m").sent_to(path))
            (reply,) = [each async for each in replies_of(answers)]
            return reply.status

        for path in ("/v1/files", "/v1/fine_tuning/jobs", "/v1/responses/resp_1", "/v1/own/x"):
            assert await status(path) == 404
        assert await status("/v1/responses", b"") == 404, "a request without a body would be a GET"
        assert asked == []
        known = ("/v1/responses", "/v1/rerank", "/v1/own", "/tokenize")
        assert [await status(path) for path in known] == [200] * 4
    assert asked == [("POST", path, "Bearer operators") for path in known]
