"""Engines and servers that were written carelessly: each mistake is said in plain words, and nothing hangs or leaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pierhead import PierheadError, override_handle
from pierhead.llm.gateway.models.model_map import VARIABLE, read_models
from pierhead.llm.objects import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ErrorInfo,
    ErrorResponse,
    RawAnswer,
    StreamEvents,
)
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm.server.engine import LLMEngine
from pierhead.llm.server.errors import LLMStartError
from pierhead.llm.server.llm_server import LLMServer
from pierhead.llm.server.service import LLMService, replies_of, server_class
from pierhead.llm.v1.llm_pb2 import LLMReply, LLMRequest
from pierhead.llm_config import LLMConfig, ModelLoading
from pierhead.metrics import RuntimeMetrics

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import until
from tests.unit.services.gateway_stand import Stand, chat, error_of

CONFIG = LLMConfig(engine="mock", model_loading=ModelLoading(model_id="mock"))
EVENT = 'data: {"object": "chat.completion.chunk", "choices": [{"delta": {"content": "a"}}]}\n\n'
WHOLE = {"object": "chat.completion", "choices": [{"message": {"content": "a"}}]}
NO = ErrorResponse.of(400, "no", kind="invalid_request_error")
METHODS = ("chat", "completions", "embeddings", "score", "tokenize", "detokenize", "transcriptions", "pass_through")


async def yields(*answers: Any) -> AsyncIterator[Any]:
    for answer in answers:
        yield answer


class Engine(LLMEngine):
    """Answers every request with what a test says."""

    def answer(self, request: Any) -> Any:
        return yields(EVENT)

    def chat(self, request: Any) -> Any:
        return self.answer(request)

    completions = embeddings = score = tokenize = detokenize = transcriptions = pass_through = chat

    async def start(self) -> None:
        pass

    async def check_health(self) -> Any:
        pass

    async def shutdown(self) -> None:
        pass


def an_engine(**members: Any) -> type[Engine]:
    return type("Careless", (Engine,), members)


async def served(engine: type[LLMEngine], server: Any = LLMServer) -> LLMService:
    make = partial(server, engine_cls=engine, report=lambda *_: None)
    made = LLMService(CONFIG, make_server=make, metrics=RuntimeMetrics())
    await made.check_health()
    return made


def asked(service: LLMService) -> Any:
    return service.Chat(LLMRequest(body=b'{"messages": []}'), None)


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((), "an ErrorResponse; found nothing"),
        ((None,), "found an object of the type NoneType, which cannot be sent"),
        ((b"data: {}\n\n",), "found an object of the type bytes"),
        ((7,), "found an object of the type int"),
        (([b"data: {}\n\n"],), "found an object of the type list"),
        (([WHOLE],), "found an object of the type list"),
        ((ChatCompletionResponse,), "found an object of the type type"),
        ((EVENT.replace("a", "\ud800"),), "surrogates not allowed"),
        ((RawAnswer("RIFF"),), "expected bytes, str found"),  # type: ignore[arg-type]
        ((StreamEvents(EVENT, tokens=-1),), "Value out of range: -1"),
        (({7: 1},), "keywords must be strings"),
        (({"a": {1}},), "the engine's answer cannot be written as JSON: a set cannot"),
        (({"data": [float("nan")]},), "the engine's answer cannot be written as JSON: Out of range float"),
        (("Paris\n\n",), "expected server-sent events, `data: .* found b'Paris"),
        ((EVENT, "Paris\n\n"), "expected server-sent events, `data: .* found b'Paris"),
        ((WHOLE, WHOLE), "expected nothing behind a whole one, found an object of the type dict"),
        ((WHOLE, EVENT), "expected nothing behind a whole one, found an object of the type str"),
        ((NO, EVENT), "expected nothing behind a whole one, found an object of the type str"),
        ((EVENT, WHOLE), "expected events alone, found a whole answer behind some"),
        ((StreamEvents(EVENT), WHOLE), "expected events alone, found a whole answer behind some"),
        (("data: {", WHOLE), "expected events alone, found a whole answer behind some"),
    ],
)
async def test_what_is_no_answer_is_said(answers: tuple[Any, ...], words: str) -> None:
    with pytest.raises(PierheadError, match=words):
        [reply async for reply in replies_of(yields(*answers))]


async def test_events_may_have_comments_and_fields() -> None:
    said = (": ping\n\n", "event: a\nid: 7\n" + EVENT, "\n" + EVENT.replace("\n", "\r\n"))
    replies = [reply async for reply in replies_of(yields(*said))]
    assert b"".join(reply.data for reply in replies).decode() == "".join(said) + "data: [DONE]\n\n"


async def a_coroutine(found: Any) -> Any:
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("found", [None, WHOLE, EVENT, [EVENT], iter([EVENT])], ids=lambda found: type(found).__name__)
async def test_a_method_that_yields_nothing_is_said(method: str, found: Any) -> None:
    """A plain `def` with `yield` is an iterator that is not asynchronous."""
    words = f"returned {type(found).__name__}: expected `async def` with `yield` for each answer"
    for answer in (lambda *_: found, lambda *_: a_coroutine(found)):
        server = (await served(an_engine(answer=answer))).server
        request = ChatCompletionRequest(messages=[]).sent_to("/v1/path")
        with pytest.raises(PierheadError, match=words):
            [each async for each in getattr(server, method)(request)]
        assert server.load().running == 0
        await server.shutdown()


# ------------------------------------------------------------------------------------- a stream, or the whole, is asked

JSON, EVENTS = "application/json", "text/event-stream"
FORMS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "an object": (JSON, (WHOLE,)),
    "a server's bytes": (JSON, (ChatCompletionResponse.from_bytes(b'\n {"choices": []}'),)),
    "JSON with its type": (JSON, (RawAnswer(b"{}", "application/json; charset=utf-8"),)),
    "a text of events": (EVENTS, (EVENT,)),
    "a text in pieces": (EVENTS, ("data: {", "}\n\n")),
    "counted events": (EVENTS, (StreamEvents(""), StreamEvents(EVENT))),
    "events with their type": (EVENTS, (RawAnswer(EVENT.encode(), EVENTS),)),
    "an error": ("", (NO,)),
    "a page": ("text/html", (RawAnswer(b"<html>", "text/html"),)),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
async def test_an_answer_in_the_wrong_form_is_said_at_the_gateway(stand: Stand, form: str, stream: bool) -> None:
    found, answers = FORMS[form]
    stand.settings = replace(stand.settings, models=read_models({VARIABLE: '{"mock": "llm-mock"}'}))
    await stand.start()
    service = await served(an_engine(answer=lambda *_: yields(*answers)))
    right, expected = 200 if found else 400, EVENTS if stream else JSON
    with override_handle("llm-mock", service):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"):
            status, body, headers = await stand.post(path, chat(model="mock", stream=stream))
            assert status == (right if found in ("", expected) else 502), (path, body)
            assert headers["Content-Type"].startswith(expected if status == 200 else JSON)
            if status == 502:
                error = json.loads(body)["error"] if path == "/v1/messages" else error_of(body)
                assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
                where = "/v1/chat/completions" if path == "/invocations" else path
                assert error["message"].startswith(f"{where}: the service llm-mock answered with {found}")
                why = f": expected {expected}, because the request's `stream` is {json.dumps(stream)}; its engine"
                assert why in error["message"]
        for path in ("/v1/embeddings", "/v1/score", "/v1/audio/speech"):  # their answers have one form
            assert (await stand.post(path, chat(model="mock", stream=stream)))[0] == right
    await until(lambda: service.server.load().running == 0, "no request is left")
    await service.aclose()


# ------------------------------------------------------------------------------------------------------------ requests


class Through(LLMServer):
    """As the documentation has it."""

    async def chat(self, request: Any, raw_request: Any = None) -> AsyncIterator[Any]:
        async for answer in super().chat(request, raw_request):
            yield answer


class Catching(LLMServer):
    async def chat(self, request: Any, raw_request: Any = None) -> AsyncIterator[Any]:
        try:
            async for answer in await super().chat(request, raw_request):
                yield answer
        except GeneratorExit:
            pass


@pytest.mark.parametrize("server", [LLMServer, Through, Catching])
async def test_a_client_that_leaves_ends_the_engines_iterator(server: type[LLMServer]) -> None:
    ended: list[str] = []

    async def endless(*_: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield EVENT
        finally:
            ended.append("ended")

    service = await served(an_engine(answer=endless), server)
    replies = asked(service)
    await anext(replies)
    assert service.server.load().running == 1
    await replies.aclose()
    for _ in range(10):  # turns of the loop, not seconds: no garbage collector is waited for
        await asyncio.sleep(0)
    assert (ended, service.server.load().running) == (["ended"], 0)
    await service.aclose()


async def test_an_engine_that_cannot_say_its_load_has_no_request_for_ever() -> None:
    broken: list[bool] = []

    def load(_: Any) -> None:
        if broken:
            raise ZeroDivisionError

    service = await served(an_engine(load=load))
    broken.append(True)
    with pytest.raises(ZeroDivisionError):
        [reply async for reply in asked(service)]
    broken.clear()
    assert service.server.load().running == 0
    await service.aclose()


# ------------------------------------------------------------------------------------------------------------ its life


@pytest.mark.parametrize("method", ["start", "check_health", "shutdown"])
async def test_methods_of_its_life_are_asynchronous(method: str) -> None:
    def plain(self: Any) -> None:
        pass

    with pytest.raises(LLMStartError, match=f"the engine mock: {method} must be `async def`"):
        await served(an_engine(**{method: plain}))


class Refuses(LLMServer):
    async def reconfigure(self, user_config: Any) -> None:
        raise ValueError("not this one")


async def hangs(self: Any) -> None:
    await asyncio.Event().wait()


async def fails(self: Any) -> None:
    raise RuntimeError("no GPU")


@pytest.mark.parametrize("shutdown", [hangs, fails])
@pytest.mark.parametrize(("start", "words"), [(fails, "no GPU"), (hangs, "^$"), (Engine.start, "not this one")])
async def test_an_end_that_hangs_or_fails_hides_no_error_of_the_start(
    shutdown: Any, start: Any, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pierhead.llm.server.llm_server.END_S", 0.01)
    told: list[str] = []
    make: Any = partial(
        Refuses, engine_cls=an_engine(start=start, shutdown=shutdown), report=lambda *r: told.append(r[0])
    )
    service = LLMService(CONFIG, make_server=make, metrics=RuntimeMetrics())
    await service.reconfigure({})
    starting = asyncio.create_task(service.check_health())
    if start is hangs:
        await until(lambda: told[-1:] == ["starting the engine mock"], "the start hangs, and says where")
        starting.cancel()
    with pytest.raises((LLMStartError, ValueError, asyncio.CancelledError), match=words):
        async with asyncio.timeout(PATIENCE_S):
            await starting
    assert "ending the engine mock, which could not be started, failed, or took more than 0.01 s" in caplog.text


class Forgets(LLMServer):
    async def __init__(self, llm_config: Any, **_: Any) -> None:  # type: ignore[misc]
        pass


class ForgetsToWait(LLMServer):
    def __init__(self, llm_config: Any, **named: Any) -> None:
        super().__init__(llm_config, **named).close()


class Ill(LLMServer):
    async def check_health(self) -> Any:
        return False


@pytest.mark.parametrize("server", [Forgets, ForgetsToWait])
async def test_a_server_that_starts_no_engine_is_not_ready(server: type[LLMServer]) -> None:
    with pytest.raises(LLMStartError, match=f"{server.__name__}: its __init__ does not start the engine: expected"):
        await served(Engine, server)


async def test_a_server_may_say_that_it_is_ill() -> None:
    service = await served(Engine, Ill)
    with pytest.raises(RuntimeError, match="says that it is not healthy"):
        await service.check_health()
    await service.aclose()


@pytest.mark.parametrize(
    ("text", "words"), [("1 / 0", "ZeroDivisionError: division by zero"), ("def", "SyntaxError: invalid syntax")]
)
async def test_a_module_that_fails_is_said(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "careless_module.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = "careless_module:Mine"
    with pytest.raises(LLMStartError, match=f'^x-serve.llm.server_cls: the server "{path}" cannot .*{words}.*; use an'):
        server_class(path)


# ------------------------------------------------------------------------------------------------------------- objects


@pytest.mark.parametrize("kind", [ChatCompletionRequest, ChatCompletionResponse, ErrorResponse])
def test_members_may_have_any_name(kind: Any) -> None:
    members = {"self": 1, "cls": 2, "data": 3, "_members": 4, "path": 5, "copy": 6, "model_dump": 7}
    for made in (kind(**members), kind.model_validate(members), kind.from_bytes(b"{}", **members)):
        assert json.loads(made.to_bytes()).items() >= members.items()
        assert made.data == 3
    assert ErrorInfo(self=1)["self"] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1}, object()])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(LLMRequestError, match="the request cannot be written as JSON: ") as refused:
        ChatCompletionRequest(messages=[], x=value).to_bytes()
    assert refused.value.http_status == 400
    with pytest.raises(PierheadError, match="the engine's answer cannot be written as JSON: ") as failed:
        ChatCompletionResponse(choices=[], x=value).to_bytes()
    assert failed.value.http_status == 500


async def test_a_number_too_large_for_json_is_refused_and_not_passed_on() -> None:
    async def reads(request: Any) -> AsyncIterator[Any]:
        request.to_bytes()
        yield WHOLE

    service = await served(an_engine(answer=lambda _, request: reads(request)))
    wired = LLMRequest(body=b'{"messages": [], "x": 1e999}')
    replies: list[LLMReply] = [reply async for reply in service.Chat(wired, None)]
    assert (replies[0].status, json.loads(replies[0].data)["error"]["code"]) == (400, "invalid_json")
    await service.aclose()
