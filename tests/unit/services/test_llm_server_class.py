"""LLMServer and LLMEngine as users have them: constructed, subclassed, named by import path."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from pierhead import PierheadError, Unavailable
from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.objects import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionRequest,
    EmbeddingRequest,
    ErrorResponse,
    TranscriptionRequest,
)
from pierhead.llm.server import service
from pierhead.llm.server.engine import LLMEngine
from pierhead.llm.server.errors import LLMStartError, NotSupported
from pierhead.llm.server.llm_server import LLMServer
from pierhead.llm.server.service import LLMService, replies_of, request_of, server_class
from pierhead.llm.v1.llm_pb2 import DescribeRequest, LLMReply, LLMRequest
from pierhead.llm_config import LLMConfig, ModelLoading
from pierhead.metrics import RuntimeMetrics
from pydantic import ValidationError

from tests.harness.six_methods import SixMethods
from tests.harness.waiting import until

CONFIG = LLMConfig(engine="mock", model_loading=ModelLoading(model_id="mock"), engine_kwargs={"tokens_per_s": 5000.0})
MESSAGES = [{"role": "user", "content": "Hi"}]
QUIET: Any = partial(LLMServer, report=lambda *_: None)


def ask(**members: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(**{"model": "mock", "messages": MESSAGES, "max_tokens": 2} | members)


async def one(answers: Any) -> Any:
    (answer,) = [answer async for answer in answers]
    return answer


@pytest.fixture
async def server() -> AsyncIterator[LLMServer]:
    made: LLMServer = await QUIET(CONFIG)
    yield made
    await made.shutdown()


# ---------------------------------------------------------------------------------------------------------- its life


async def test_an_awaited_one_is_started(server: LLMServer) -> None:
    answer = await one(server.chat(ask()))
    assert isinstance(answer, ChatCompletionResponse)
    assert answer.choices[0].message.content
    assert await server.llm_config() is CONFIG
    assert (await server.describe()).model_id == "mock"
    await server.check_health()


async def test_what_sync_init_returns_is_started_by_start() -> None:
    server = LLMServer.sync_init(CONFIG, report=lambda *_: None)
    with pytest.raises(Unavailable, match="the engine is not started yet"):
        await one(server.chat(ask()))
    await server.start()
    assert (await one(server.chat(ask()))).choices
    await server.shutdown()
    with pytest.raises(Unavailable, match="the engine is not started yet"):
        await one(server.chat(ask()))


async def test_a_start_that_fails_or_is_cancelled_ends_the_engine() -> None:
    ended: list[str] = []

    class Slow(MockEngine):
        async def start(self) -> None:
            await asyncio.Event().wait()

        async def shutdown(self) -> None:
            ended.append("ended")

    starting = asyncio.ensure_future(QUIET(CONFIG, engine_cls=Slow))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(starting, 0.2)
    assert ended == ["ended"]


async def test_options_are_those_of_the_config() -> None:
    class Config:
        def get_deployment_options(self) -> dict[str, Any]:
            return {"num_replicas": 2}

    assert LLMServer.get_deployment_options(Config()) == {"num_replicas": 2}
    assert LLMServer.get_deployment_options(CONFIG) == {"max_ongoing_requests": 1000}


# ----------------------------------------------------------------------------------------------------------- requests


async def test_both_forms_of_a_call_iterate(server: LLMServer) -> None:
    """`async for ... in server.chat()`, and Ray Serve LLM's `async for ... in await server.chat()`."""
    assert [type(answer) async for answer in server.chat(ask())] == [ChatCompletionResponse]
    assert [type(answer) async for answer in await server.chat(ask())] == [ChatCompletionResponse]
    answers = server.chat(ask(stream=True, max_tokens=1000))
    assert "data: " in await anext(answers)
    await answers.aclose()
    assert server.load().running == 0


async def test_a_request_without_a_model_is_for_the_one_that_is_served(server: LLMServer) -> None:
    for request in (ChatCompletionRequest(messages=MESSAGES, max_tokens=2), ask(model=None), ask(model="")):
        assert (await one(server.chat(request))).model == "mock"


async def test_a_refusal_is_an_error_response(server: LLMServer) -> None:
    for request, status, code in (
        (ask(model="another"), 404, "model_not_found"),
        (ask(messages=7), 400, "invalid_type"),
        (ChatCompletionRequest.from_bytes(b"[", model="mock"), 400, "invalid_json"),
    ):
        answer = await one(server.chat(request))
        assert isinstance(answer, ErrorResponse)
        assert (answer.status, answer.error.code) == (status, code)


async def test_a_paused_one_lets_requests_wait(server: LLMServer) -> None:
    await server.pause()
    waiting = asyncio.ensure_future(one(server.chat(ask())))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert (await server.is_paused(), done) == (True, set())
    await server.resume()
    assert (await waiting).choices
    assert not await server.is_paused()


async def test_it_sleeps_and_wakes_up(server: LLMServer) -> None:
    await server.sleep(level=1)
    assert await server.is_sleeping()
    with pytest.raises(Unavailable, match="the engine sleeps"):
        await one(server.chat(ask()))
    await server.wakeup(tags=None)
    assert not await server.is_sleeping()
    await server.reset_prefix_cache()
    assert (await one(server.chat(ask()))).choices


@pytest.mark.parametrize("falls_asleep", [True, False])
async def test_a_sleep_or_a_waking_whose_caller_leaves_ends_as_if_it_had_stayed(
    server: LLMServer, falls_asleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not know of the caller: what it has begun happens."""
    begun, may_end, did = asyncio.Event(), asyncio.Event(), []

    async def slow(*_: Any) -> None:
        begun.set()
        await may_end.wait()
        did.append("done")

    engine = cast("MockEngine", server.engine)
    if not falls_asleep:
        await server.sleep()
    monkeypatch.setattr(engine, "sleep" if falls_asleep else "wake", slow)
    calling = asyncio.ensure_future(server.sleep() if falls_asleep else server.wakeup())
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    with pytest.raises(Unavailable, match="the engine sleeps"):
        await one(server.chat(ask()))
    may_end.set()
    await until(lambda: bool(did), "the engine has done it")
    await asyncio.sleep(0)
    assert await server.is_sleeping() is falls_asleep


async def test_an_engine_that_fails_to_fall_asleep_is_awake(server: LLMServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(server.engine, "sleep", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        await server.sleep()
    assert (await one(server.chat(ask()))).choices


class RayEngine(MockEngine):
    """What Ray Serve LLM's engines have."""

    seen: Any = None

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:  # type: ignore[override]
        type(self).seen = raw_request_info
        async for answer in super().chat(request):
            yield answer

    def routing_stats(self) -> dict[str, Any]:
        return {"at": "tcp://here"}

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        return [method, *args]

    async def start_profile(self) -> None:
        RayEngine.seen = "a profile"


async def test_an_engine_in_rays_form_gets_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await QUIET(CONFIG, engine_cls=RayEngine)
    monkeypatch.setattr(inspect, "signature", None)  # methods are looked at when the engine starts, not at each request
    await one(server.chat(ask(), {"headers": {}}))
    assert RayEngine.seen == {"headers": {}}
    assert await server.record_routing_stats() == {"at": "tcp://here"}
    assert await server.collective_rpc("save", args=(1,)) == ["save", 1]
    await server.start_profile()
    assert RayEngine.seen == "a profile"
    with pytest.raises(NotSupported, match="the engine mock has no stop_profile"):
        await server.stop_profile()
    await server.shutdown()


async def test_what_an_engine_has_not_is_said(server: LLMServer) -> None:
    assert await server.record_routing_stats() == {}
    with pytest.raises(NotSupported, match="the engine mock has no collective_rpc"):
        await server.collective_rpc("save")
    answer = await one(server.transcriptions(TranscriptionRequest(model="mock", file=b"")))
    assert answer.error.message == "this model's engine does not serve /v1/audio/transcriptions"


async def test_an_engine_that_says_it_is_not_healthy_is_ill() -> None:
    class Ill(SixMethods):
        async def check_health(self) -> bool:
            return False

    server = await QUIET(CONFIG, engine_cls=Ill)
    with pytest.raises(RuntimeError, match="the engine mock says that it is not healthy"):
        await server.check_health()
    await server.shutdown()


async def test_six_methods_are_an_engine() -> None:
    server = await QUIET(CONFIG, engine_cls=SixMethods)
    answers = server.chat(ask(stream=True, max_tokens=500))
    await anext(answers)
    assert server.load().running == 1, "the server counts"
    await answers.aclose()
    assert server.load().running == 0
    await server.check_health()
    await server.shutdown()


# --------------------------------------------------------------------------------------------------------- subclasses


class Shouting(LLMServer):
    """A server of a user's."""

    started = 0

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]
        await super().__init__(llm_config, report=lambda *_: None)
        type(self).started += 1

    async def chat(self, request: Any, raw_request: Any = None) -> AsyncIterator[Any]:
        request = request.model_copy(update={"messages": [*request.messages, {"role": "user", "content": "Louder"}]})
        async for answer in super().chat(request, raw_request):
            if isinstance(answer, ChatCompletionResponse):
                answer.choices[0].message.content = "AH"
            yield answer

    async def completions(self, request: Any, raw_request: Any = None) -> Any:
        return await super().completions(request, raw_request)  # as Ray Serve LLM has it


HERE = f"{__name__}:Shouting"


async def wire(service: LLMService, method: str = "Chat", path: str = "", **body: Any) -> list[LLMReply]:
    raw = json.dumps({"messages": MESSAGES, "max_tokens": 2} | body).encode()
    request = LLMRequest(body=raw, model="mock", path=path)
    return [reply async for reply in getattr(service, method)(request, None)]


async def test_a_server_of_a_users_runs_by_its_import_path() -> None:
    service = LLMService(CONFIG.model_copy(update={"server_cls": HERE}), metrics=RuntimeMetrics())
    before = Shouting.started
    await service.check_health()
    try:
        assert Shouting.started == before + 1
        (reply,) = await wire(service)
        body = json.loads(reply.data)
        assert body["choices"][0]["message"]["content"] == "AH"
        assert (reply.status, reply.tokens) == (200, body["usage"]["completion_tokens"])
        assert body["usage"]["prompt_tokens"] > (await prompt_tokens_without_it())
        (reply,) = await wire(service, "Completions", prompt="Hi")
        assert json.loads(reply.data)["object"] == "text_completion"
        replies = await wire(service, stream=True)
        assert sum(each.tokens for each in replies) == 2
        (reply,) = [each async for each in service.Chat(LLMRequest(body=b"{}"), None)]
        assert reply.status == 400, "it reads messages, which are not there"
        assert json.loads(reply.data)["error"]["param"] == "messages"
    finally:
        await service.aclose()


async def prompt_tokens_without_it() -> int:
    server = await QUIET(CONFIG)
    answer = await one(server.chat(ask()))
    await server.shutdown()
    tokens: int = answer.usage.prompt_tokens
    return tokens


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_package.server:MyServer", "cannot be imported from no_such_package.server:MyServer: No module named"),
        (f"{__name__}:Missing", "has no attribute 'Missing'"),
        ("json:JSONDecoder", "json:JSONDecoder is not a subclass of pierhead.llm.server.llm_server.LLMServer"),
        ("json:loads", "json:loads is not a subclass of pierhead.llm.server.llm_server.LLMServer"),
    ],
)
async def test_a_server_that_cannot_be_says_why(path: str, words: str) -> None:
    service = LLMService(CONFIG.model_copy(update={"server_cls": path}), metrics=RuntimeMetrics())
    with pytest.raises(LLMStartError, match=words) as caught:
        await service.check_health()
    assert str(caught.value).startswith("x-serve.llm.server_cls: ")
    assert server_class(None) is LLMServer
    await service.aclose()


@pytest.mark.parametrize("name", ["MyServer", "my_package.server", "a b:C"])
def test_a_server_in_a_file_is_an_import_path(name: str) -> None:
    with pytest.raises(ValidationError, match='expected an import path such as "my_package'):
        LLMConfig(model_loading=ModelLoading(model_id="m"), server_cls=name)


# -------------------------------------------------------------------------------------------- what engines may answer


class Plain(LLMEngine):
    """Yields what a test says."""

    said: tuple[Any, ...] = ()

    async def chat(self, request: ChatCompletionRequest) -> AsyncIterator[Any]:
        for each in self.said:
            if isinstance(each, Exception):
                raise each
            yield each

    async def completions(self, request: CompletionRequest) -> AsyncIterator[Any]:
        yield ErrorResponse.of(400, "no", kind="invalid_request_error")

    async def embeddings(self, request: EmbeddingRequest) -> AsyncIterator[Any]:
        yield ErrorResponse.of(400, "no", kind="invalid_request_error")

    async def start(self) -> None:
        pass

    async def check_health(self) -> None:
        pass

    async def shutdown(self) -> None:
        pass


def chunk(text: str) -> str:
    return f'data: {{"object": "chat.completion.chunk", "choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'


async def said(*answers: Any) -> list[LLMReply]:
    engine = Plain(CONFIG)
    engine.said = answers
    return [reply async for reply in replies_of(engine.chat(ask()))]


async def test_plain_strings_are_counted_and_get_their_end() -> None:
    replies = await said(chunk("Pa"), chunk("ris")[:10], chunk("ris")[10:])
    assert b"".join(reply.data for reply in replies) == (chunk("Pa") + chunk("ris")).encode() + b"data: [DONE]\n\n"
    assert [reply.status for reply in replies] == [200, 0, 0, 0]
    assert sum(reply.tokens for reply in replies) == replies[-1].usage.completion_tokens == 2
    own = await said(chunk("Pa"), "data: [DONE]\n\n")
    assert b"".join(reply.data for reply in own).count(b"[DONE]") == 1
    assert own[-1].usage.completion_tokens == 1


async def test_batches_and_objects_of_a_stream_are_events() -> None:
    event = ChatCompletionStreamResponse(choices=[{"delta": {"content": "Pa"}}])
    for first in ([chunk("Pa")], event, event.model_dump()):
        replies = await said(first, chunk("ris"))
        assert replies[0].data.startswith(b"data: {")
        assert replies[0].data.endswith(b"}\n\n")
        assert replies[-1].usage.completion_tokens == 2


async def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(PierheadError, match=r"expected server-sent events, `data: .* found b'Paris'"):
        await said("Paris")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ({"error": {"message": "no", "type": "NotFoundError", "param": "model", "code": 404}}, 404, "model_not_found"),
        ({"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}, 400, None),
        (ErrorResponse.of(413, "no", kind="invalid_request_error", code="too_much"), 413, "too_much"),
    ],
)
async def test_an_error_is_an_answer_at_first_and_a_failure_later(error: Any, status: int, code: str | None) -> None:
    (reply,) = await said(error)
    assert (reply.status, json.loads(reply.data)["error"]["code"]) == (status, code)
    with pytest.raises(PierheadError, match=r'the engine failed while it answered: .*"message": "no"'):
        await said(chunk("Pa"), error)


# ------------------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize("audio", [b"RIFF\x00\xff\r\n--\r\nx\n\r\x85", b"", bytes(range(256))])
def test_a_form_is_read_when_somebody_looks_and_passed_on_unchanged(audio: bytes) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    body = part % (b"language", b"", b"en") + part % (b"file", b'; filename="a.wav"', audio) + b"--b--\r\n"
    wired = LLMRequest(
        body=body, path=service.TRANSCRIPTIONS, model="m", content_type="multipart/form-data; boundary=b"
    )
    request = request_of(TranscriptionRequest, wired)
    assert request.model == "m"
    assert request.to_bytes() == body
    assert request.language == "en"
    assert request.file == audio
    assert request.to_bytes() == body


async def test_transcriptions_are_a_method_of_their_own() -> None:
    asked: list[Any] = []

    class Hears(MockEngine):
        async def transcriptions(self, request: TranscriptionRequest) -> AsyncIterator[Any]:
            asked.append(request)
            yield {"text": "Hello"}

    made = LLMService(CONFIG, make_server=partial(QUIET, engine_cls=Hears), metrics=RuntimeMetrics())
    await made.check_health()
    (reply,) = await wire(made, "PassThrough", service.TRANSCRIPTIONS)
    assert json.loads(reply.data) == {"text": "Hello"}
    assert isinstance(asked[0], TranscriptionRequest)
    assert (await made.Describe(DescribeRequest(), None)).model_id == "mock"
    await made.aclose()


# ------------------------------------------------------------------------------------------------ the pages' examples

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "language-models.md"


def example(title: str) -> str:
    """The code of this title on the page."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f'```python title="{title}"\n')
    return rest.partition("```\n")[0]


@pytest.fixture
def my_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of the page's examples, as a user's image has it."""
    (tmp_path / "my_package").mkdir()
    for name in ("engine", "server"):
        (tmp_path / "my_package" / f"{name}.py").write_text(example(f"my_package/{name}.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [each for each in sys.modules if each.startswith("my_package")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("my_package")
async def test_the_pages_engine_and_server_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LLMConfig(
        engine="my_package.engine:MyEngine",
        server_cls="my_package.server:MyServer",
        model_loading=ModelLoading(model_id="mock"),
    )
    monkeypatch.setattr("pierhead.replica.starting.START.report", lambda *_: None)
    made = LLMService(config, metrics=RuntimeMetrics())
    await made.check_health()
    await made.check_health()
    try:
        (reply,) = await wire(made, messages=[{"role": "user", "content": "hello sea"}])
        assert json.loads(reply.data)["choices"][0]["message"]["content"] == "HELLO SEA"
        replies = await wire(made, messages=[{"role": "user", "content": "hello sea"}], stream=True)
        text = b"".join(each.data for each in replies).decode()
        assert text.endswith("data: [DONE]\n\n")
        said = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in said) == "HELLO SEA"
        assert replies[-1].usage.completion_tokens == 2
        (reply,) = await wire(made, messages=[{"role": "user", "content": "the secret"}])
        assert reply.status == 403
        (reply,) = await wire(made, "Embeddings", input="Hi")
        assert reply.status == 404
    finally:
        await made.aclose()
    for name in [each for each in sys.modules if each.startswith("my_package")]:
        del sys.modules[name]
