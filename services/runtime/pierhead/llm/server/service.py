"""The gRPC service that gateways call: bytes of the wire in, an LLMServer's answers out as bytes of the wire.

first check_health:  import and construct the server, which starts its engine, its adapters of user_config
then:                the server's check_health
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import grpc
from pierhead import BadRequest, PierheadError
from pierhead.admin_token import shows
from pierhead.errors import RemoteError
from pierhead.llm import objects
from pierhead.llm.objects import ErrorResponse, OpenAIAnswer, OpenAIRequest, RawAnswer, StreamEvents
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm.server.background import in_background
from pierhead.llm.server.direct import DirectWriter
from pierhead.llm.server.engine import EngineStats
from pierhead.llm.server.errors import not_started
from pierhead.llm.server.events import Account, Splitter
from pierhead.llm.server.exposition import show
from pierhead.llm.server.llm_server import LLMServer, give_up, opened, wanted_adapters
from pierhead.llm.server.registry import class_at
from pierhead.llm.v1.llm_pb2 import DescribeRequest, LLMReply, LLMRequest, ModelCard, Operation, OperationDone
from pierhead.llm.v1.llm_pb2_grpc import LLMServerServicer
from pierhead.llm_config import LLMConfig
from pierhead.metrics import PROCESS, RuntimeMetrics

logger = logging.getLogger(__name__)

LARGEST_REPLY = 60 * 1024 * 1024
"""Bytes of one reply: a little less than the largest message between services."""

TRANSCRIPTIONS = "/v1/audio/transcriptions"

DONE = b"data: [DONE]\n\n"

MakeServer = Callable[[Any], Any]
"""A class of servers, or what calls one: awaited, it is a server that has started."""


def request_of(kind: type[OpenAIRequest], request: LLMRequest) -> OpenAIRequest:
    """A request of the wire, its body not parsed. Raises LLMRequestError for wrong `overrides`."""
    instead = objects.json_object(request.overrides, "LLMRequest.overrides") if request.overrides else {}
    if request.model:
        instead["model"] = request.model
    return kind.from_bytes(request.body, **instead).sent_to(request.path, request.content_type)


def _replying(find: Callable[[Any, Any], Any]) -> Callable[..., AsyncGenerator[LLMReply, None]]:
    """A method of the service: it answers with what `find` finds for the request, a server's or an engine's answers.

    It is the only generator between an engine and the wire, unless a user's server is between them: every reply passes
    each of them twice.
    """

    async def answer(self: Any, request: Any, context: Any = None) -> AsyncGenerator[LLMReply, None]:
        writer = _Writer()
        direct = DirectWriter(request, context)
        try:
            async with opened(find(self, request)) as answers:
                async for answer in answers:
                    if writer.has_begun and type(answer) is StreamEvents and answer.usage is None:
                        # Nearly all of them; the rest is for the others.
                        reply = await direct.write(answer.encode("utf-8", "surrogateescape"), answer.tokens)
                        if reply is not None:
                            yield reply
                    else:
                        yield await direct.with_others(writer.reply_of(answer), events=isinstance(answer, StreamEvents))
                await direct.finish()
                if last := writer.end():
                    yield last
        except LLMRequestError as error:
            if writer.has_begun:
                raise
            yield writer.reply_of(ErrorResponse.to(error))
        finally:
            direct.close()

    return answer


_written = _replying(lambda _, answers: answers)


def replies_of(answers: Any) -> AsyncGenerator[LLMReply, None]:
    """What a server's or an engine's method returned, as replies of the wire."""
    return _written(None, answers)


class _Writer:
    """Writes the answers to one request. Raises LLMRequestError for an answer that does not fit into one message."""

    def __init__(self) -> None:
        self.has_begun = False
        self._is_whole = False
        """Whether the answer is one object, which nothing may follow."""
        self._plain: tuple[Splitter, Account] | None = None
        """Of a stream of plain strings, whose tokens nobody else counts."""

    def reply_of(self, answer: Any) -> LLMReply:
        """One reply. Raises PierheadError for what is no answer."""
        if self._is_whole:
            raise PierheadError(f"the engine's answer: expected nothing behind a whole one, found {_kind(answer)}")
        try:
            reply = self._reply_of(answer)
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise PierheadError(
                f"the engine's answer: expected {_EXPECTED}; found {_kind(answer)}, which cannot be sent: {error}"
            ) from error
        if len(reply.data) > LARGEST_REPLY:
            raise LLMRequestError(
                f"the answer has {len(reply.data)} bytes, and at most {LARGEST_REPLY} can be sent at once; ask for "
                "fewer inputs or choices at a time, or for a stream",
                code="answer_too_large",
            )
        self._is_whole = self._plain is None and not isinstance(answer, StreamEvents | RawAnswer)
        if not self.has_begun:
            self.has_begun = True
            reply.status = answer.status if isinstance(answer, RawAnswer) else reply.status or 200
        return reply

    def _reply_of(self, answer: Any) -> LLMReply:
        if isinstance(answer, StreamEvents):
            reply = LLMReply(data=answer.encode("utf-8", "surrogateescape"), tokens=answer.tokens)
            _add_usage(reply, answer.usage)
        elif isinstance(answer, RawAnswer):
            reply = LLMReply(data=answer.data, content_type=answer.content_type, tokens=answer.tokens)
            _add_usage(reply, answer.usage)
        elif isinstance(answer, str | list):
            reply = self._events("".join(answer))
        else:
            return self._whole(object_of(answer))
        return reply

    def end(self) -> LLMReply | None:
        """What is to be said at the end of a stream of plain strings. Raises PierheadError if that is none, or if
        there was no answer."""
        if not self.has_begun:
            raise PierheadError(f"the engine's answer: expected {_EXPECTED}; found nothing")
        if self._plain is None:
            return None
        splitter, account = self._plain
        if rest := splitter.rest.strip():
            raise _no_event(rest)
        if account.done:
            return None
        return self._counted(LLMReply(data=DONE), account, ends=True)

    def _events(self, text: str) -> LLMReply:
        self._plain = self._plain or (Splitter(), Account(hide_usage=False))
        splitter, account = self._plain
        events = list(splitter.feed(text.encode()))
        for event in events:
            if not _EVENT.match(event):
                raise _no_event(event)
        data = b"".join([event for event in events if account.note(event)])
        return self._counted(LLMReply(data=data), account, ends=account.done)

    def _counted(self, reply: LLMReply, account: Account, *, ends: bool) -> LLMReply:
        reply.tokens = account.take()
        if ends:
            account.usage.completion_tokens = account.tokens
            _add_usage(reply, account.usage)
        return reply

    def _whole(self, answer: OpenAIAnswer) -> LLMReply:
        if isinstance(answer, ErrorResponse):
            if self.has_begun:
                raise PierheadError(f"the engine failed while it answered: {answer.to_bytes()[:1000].decode()}")
            return LLMReply(data=_in_words(answer).to_bytes(), status=answer.status)
        if isinstance(answer, _STREAMED):
            return self._events(f"data: {answer.to_bytes().decode()}\n\n")
        if self.has_begun:
            raise PierheadError("the engine's answer: expected events alone, found a whole answer behind some")
        usage = answer.accounting()
        reply = LLMReply(data=answer.to_bytes(), tokens=usage.completion_tokens)
        _add_usage(reply, usage)
        return reply


_STREAMED = (
    objects.ChatCompletionStreamResponse,
    objects.CompletionStreamResponse,
    objects.TranscriptionStreamResponse,
)


_EXPECTED = "server-sent events as str, a response object or dict, or an ErrorResponse"

_EVENT = re.compile(rb"\s*(data|event|id|retry|)(:|\s*$)")
"""What an event may begin with; a colon alone begins a comment."""


def _no_event(found: bytes) -> PierheadError:
    return PierheadError(
        "the engine's stream: expected server-sent events, `data: {...}` and a blank line behind each, found "
        f"{found[:200]!r}"
    )


def _kind(answer: Any) -> str:
    return f"an object of the type {type(answer).__name__}"


def object_of(answer: Any) -> OpenAIAnswer:
    """An answer that an engine gave as an object of ours or of pydantic's kind, or as a dict."""
    if isinstance(answer, OpenAIAnswer):
        return answer
    members = answer if isinstance(answer, Mapping) else answer.model_dump()
    if "error" in members and "choices" not in members:
        return ErrorResponse(**members)
    if str(members.get("object")).endswith(".chunk"):
        return objects.ChatCompletionStreamResponse(**members)
    return OpenAIAnswer(**members)


def _in_words(answer: ErrorResponse) -> ErrorResponse:
    """An error whose code, which vLLM and Ray Serve LLM have as the HTTP status, is a word or null, as OpenAI's is."""
    error = answer.error
    if not isinstance(error, dict) or not isinstance(error.get("code"), int):
        return answer
    code = None
    if answer.status == 404:
        code = "model_not_found" if error.get("param") == "model" else "not_found"
    return answer.model_copy(update={"error": {**error, "code": code}}).with_status(answer.status)


def _add_usage(reply: LLMReply, usage: objects.Usage | None) -> None:
    if usage is not None:
        reply.usage.prompt_tokens = usage.prompt_tokens
        reply.usage.completion_tokens = usage.completion_tokens
        reply.usage.cached_tokens = usage.cached_tokens
        reply.usage.finish_reason = usage.finish_reason


def _method(name: str, kind: type[OpenAIRequest]) -> Any:
    """The method of the service that answers with the server's method of this name."""
    return _replying(lambda service, request: service._asked(name, kind, request))


class LLMService(LLMServerServicer):
    """Serves one LLMConfig. The first `check_health` starts the server: nothing comes before it."""

    __no_use__ = frozenset({"Describe"})
    """The gateway asks for it again and again, also where no client uses the model."""

    def __init__(
        self,
        config: LLMConfig,
        *,
        make_server: MakeServer | None = None,
        metrics: RuntimeMetrics = PROCESS,
        admin_token: str = "",
    ) -> None:
        """`admin_token`: what `Operate` asks for; "" = nothing."""
        self.config = config
        self._admin_token = admin_token
        self._make_server = make_server
        self._server: LLMServer | None = None
        self._user_config: Mapping[str, Any] | None = None
        """What was wanted before the start."""
        show(metrics, self._load, self._expose)

    @property
    def server(self) -> LLMServer:
        """The server. Raises Unavailable before it has started."""
        if self._server is None:
            raise not_started()
        return self._server

    # ---- requests

    Chat = _method("chat", objects.ChatCompletionRequest)
    Completions = _method("completions", objects.CompletionRequest)
    Embeddings = _method("embeddings", objects.EmbeddingRequest)
    Score = _method("score", objects.ScoreRequest)
    Tokenize = _method("tokenize", objects.TokenizeRequest)
    Detokenize = _method("detokenize", objects.DetokenizeRequest)
    PassThrough = _method("pass_through", OpenAIRequest)

    def _asked(self, name: str, kind: type[OpenAIRequest], request: LLMRequest) -> Any:
        if request.path == TRANSCRIPTIONS:
            name, kind = "transcriptions", objects.TranscriptionRequest
        return getattr(self.server, name)(request_of(kind, request))

    # ---- what is served, and what operators do to it

    async def Describe(self, request: DescribeRequest, context: Any) -> ModelCard:
        """What is served here."""
        return ModelCard(**dataclasses.asdict(await self.server.describe()))

    async def Operate(self, request: Operation, context: Any) -> OperationDone:
        """Run the operation, and return when it is done. Raises NotSupported, BadRequest, RemoteError (no token).

        An operator's sleep does not show in the report of `PUT /sleep`, which is the controller's. A `wake` of either
        ends the sleep of both.
        """
        self._require_token(context)
        server = self.server
        what = request.WhichOneof("what")
        if what == "sleep":
            await server.sleep(level=request.sleep.level)
        elif what == "wake":
            await server.wakeup()
        elif what == "reset_prefix_cache":
            await server.reset_prefix_cache()
        elif what == "load_adapter":
            await server.load_adapter(request.load_adapter.adapter)
        elif what == "unload_adapter":
            await server.unload_adapter(request.unload_adapter.adapter)
        else:
            raise BadRequest("Operation.what: expected one of its members, found none")
        logger.info("done: %s", what)
        return OperationDone()

    def _require_token(self, context: Any) -> None:
        """Raise RemoteError for a call without the token, as the admin port refuses `PUT /sleep`."""
        shown = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not shows(str(shown), self._admin_token):
            raise RemoteError(
                "Operate is for the controller alone, by a token (`pierhead llm sleep` and `wake` ask the controller); "
                "if its state was lost, restart the service",
                grpc.StatusCode.PERMISSION_DENIED,
            )

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """See LLMServer.reconfigure."""
        if self._server is not None:
            await self._server.reconfigure(user_config)
            return
        if self.config.server_cls is None:
            wanted_adapters(self.config, user_config)
        self._user_config = user_config

    # ---- the controller's PUT /sleep

    @property
    def can_sleep(self) -> bool:
        """See LLMServer.can_sleep."""
        return self._server is not None and self._server.can_sleep

    async def sleep(self) -> None:
        """Level 1. Raises BadRequest while an operator has it sleep at level 2, else what the engine raises."""
        await self.server.sleep(level=1)

    async def wake(self) -> None:
        """See LLMServer.wakeup."""
        await self.server.wakeup()

    # ---- its life

    async def check_health(self) -> None:
        """See LLMServer.check_health. The first call starts the server."""
        if self._server is None:
            self._server = await self._start()
        elif await self._server.check_health() is False:
            raise RuntimeError(f"the server {self.config.server_cls} says that it is not healthy")

    async def _start(self) -> LLMServer:
        """Raises LLMStartError."""
        make = self._make_server
        if make is None:
            make = (await in_background(server_class, self.config.server_cls)).of_x_serve
        server: LLMServer = await make(self.config)
        if self._user_config is not None:
            try:
                await server.reconfigure(self._user_config)
            except BaseException:
                await give_up(server)
                raise
        return server

    async def aclose(self) -> None:
        """End the server; called at the replica's end."""
        if self._server is not None:
            await self._server.shutdown()

    def _load(self) -> EngineStats:
        return EngineStats() if self._server is None else self._server.load()

    def _expose(self) -> bytes:
        return b"" if self._server is None else self._server.expose()


def server_class(path: str | None) -> type[LLMServer]:
    """The class of x-serve.llm.server_cls. Raises LLMStartError."""
    if path is None:
        return LLMServer
    found: type[LLMServer] = class_at(path, LLMServer, f'x-serve.llm.server_cls: the server "{path}"', "another server")
    return found
