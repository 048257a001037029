"""One request from its arrival to the end of its answer.

key -> body -> model -> limits -> [prefill] -> service -> answer: whole, or events as they come
                                                             `--> accounts, however it ended
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

from aiohttp import hdrs, web
from pierhead.errors import Backpressure, DeadlineExceeded, NoReplica, PierheadError, Unavailable
from pierhead.http.direct_writer import direct_writer
from pierhead.http.errors import ERROR_HEADERS
from pierhead.llm.v1.llm_pb2 import LLMReply, LLMRequest
from pierhead.request import CURRENT

from services.llm.gateway.body.body import Asked, read_body
from services.llm.gateway.endpoints import Endpoint, is_path
from services.llm.gateway.errors import JSON, ApiError, answer_error, error_event, unknown_model, unknown_path
from services.llm.gateway.keys.limits import duration
from services.llm.gateway.meter import Meter
from services.llm.gateway.models.model_map import Route
from services.llm.gateway.models.prefill import decode_overrides, prefill_overrides

if TYPE_CHECKING:
    from pierhead.http.visit import Visit

    from services.llm.gateway.gateway import Gateway
    from services.llm.gateway.keys.key_file import Holder
    from services.llm.gateway.models.targets import Target

EVENTS = "text/event-stream"

CLIENT_LEFT = "499"

GAVE_UP = (CLIENT_LEFT, str(DeadlineExceeded.http_status))
"""How requests end that their client, who says how long it waits, has ended."""

LAST_EVENT_S = 2.0
"""How long a stream that has failed may take to say so."""


class EventResponse(web.StreamResponse):
    """Its head goes with the first event, in one packet."""

    _send_headers_immediately = False  # as in web.Response


class Exchange:
    """One request of a client."""

    __slots__ = (
        "_asked", "_code", "_endpoint", "_gateway", "_headers", "_holder", "_meter", "_request", "_room", "_route",
    )  # fmt: skip

    def __init__(self, gateway: Gateway, request: web.Request, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._request = request
        self._endpoint = endpoint
        visit = self._visit
        self._meter = Meter(time.monotonic() if visit is None else visit.started)
        self._holder: Holder | None = None
        self._asked: Asked | None = None
        """Set once it was admitted."""
        self._route: Route | None = None
        self._headers: dict[str, str] = {}
        """Of every answer."""
        self._room = 0
        """Bytes that were taken for the body."""
        self._code = ""
        """How a stream ended whose head had said something else."""

    @property
    def _visit(self) -> Visit | None:
        return getattr(self._request, "visit", None)

    async def answer(self) -> web.StreamResponse:
        """The response. Raises what the runtime's edge answers better: its own errors, and that the client left."""
        code = CLIENT_LEFT
        self._gateway.ongoing += 1
        try:
            response = await self._run()
            code = self._code or str(response.status)
        except ApiError as error:
            code = str(error.status)
            response = answer_error(error, self._headers)
        except BaseException as error:
            known = self._known(error)
            if known is None:
                code = self._code or code
                raise
            code = str(self._status(known))
            if known is error:
                raise
            raise known from error
        finally:
            self._gateway.ongoing -= 1
            self._give_room_back()
            self._account(code)
        return response

    # ---- before the service

    async def _run(self) -> web.StreamResponse:
        gateway, request, endpoint = self._gateway, self._request, self._endpoint
        self._holder = gateway.identify(request)
        if not endpoint.path and not is_path(request.path):
            raise unknown_path(request.path)
        content_type = request.headers.get(hdrs.CONTENT_TYPE, "")
        body = await self._read()
        asked = read_body(body, content_type, messages=endpoint.messages)
        route = self._find(asked.model)
        self._admit(asked)
        context = CURRENT.get()
        if context is not None:
            # The router goes by it, so it is the model's adapter, whatever the client has put into the header.
            CURRENT.set(context._replace(model_id=route.adapter or None))
        message = LLMRequest(
            body=asked.body_for(body, route.model),
            path=endpoint.path or request.path,
            model=route.model,
            content_type="" if asked.members else content_type,
            routing_text=asked.prompt.beginning,
        )
        if route.prefill is not None and endpoint.generates:
            refused = await self._prefill(message, gateway.targets[route.prefill], asked, route)
            if refused is not None:
                return refused
        call = self._call(gateway.targets[route.service], message)
        del body, message  # the call has it, until its answer begins
        try:
            return await self._relay(call, asked)
        finally:
            call.cancel()

    async def _read(self) -> bytes:
        """The body, with room taken for it. Raises ApiError; Backpressure where there is no room."""
        limit = self._gateway.settings.max_body_bytes
        if (self._request.content_length or 0) > limit:
            raise _too_large(limit)
        body = bytearray()
        try:
            while piece := await self._request.content.readany():
                if len(body) + len(piece) > limit:
                    raise _too_large(limit)
                self._take_room(len(piece))
                body += piece
        except web.RequestPayloadError as error:
            why = str(error).removeprefix("400, message:").strip()
            raise ApiError(400, f"the request body cannot be read: {why}", code="invalid_body") from None
        return bytes(body)

    def _take_room(self, size: int) -> None:
        bodies = self._gateway.bodies
        if not bodies.take(size):
            raise Backpressure(
                f"the bodies of all requests that wait for an answer have the {bodies.limit} bytes that this gateway "
                "keeps for them; ask again in a moment"
            )
        self._room += size

    def _give_room_back(self) -> None:
        self._gateway.bodies.give_back(self._room)
        self._room = 0

    def _find(self, name: str) -> Route:
        """The model's route, if this client may use it."""
        route = self._gateway.models.find(name)
        if route is None:
            raise unknown_model(name)
        self._route = route
        holder = self._holder
        if holder is not None and not holder.key.may_use((name, route.model)):
            message = f"The API key {holder.key.name} does not have access to the model `{name}`; its scope is another."
            raise ApiError(403, message, code="model_not_allowed", param="model")
        return route

    def _admit(self, asked: Asked) -> None:
        """Count it against the key's limits."""
        if self._holder is None:
            self._asked = asked
            return
        key, limits = self._holder
        now = self._gateway.clock()
        refused = limits.admit(asked.tokens, now)
        self._request[ERROR_HEADERS] = self._headers = limits.headers(now)
        if refused is None:
            self._asked = asked
            return
        message = (
            f"Rate limit reached for {refused.what} per min of the API key {key.name}: limit {refused.per_minute:.0f}. "
            f"Please try again in {duration(refused.wait_s)}."
        )
        wait = {"Retry-After": str(math.ceil(refused.wait_s))}
        raise ApiError(429, message, kind=refused.what, code="rate_limit_exceeded", headers=wait)

    def _call(self, target: Target, message: LLMRequest) -> Any:
        return getattr(target.stub, self._endpoint.rpc)(message)

    async def _prefill(
        self, message: LLMRequest, target: Target, asked: Asked, route: Route
    ) -> web.StreamResponse | None:
        """Have the prompt read elsewhere, and `message` say where. Returns the answer where that refuses."""
        outcome = "error"
        try:
            if asked.choices > 1:  # what is handed over is the state of one sequence
                outcome = "several_choices"
                return None
            if not target.has_replica() and self._gateway.settings.prefill_fallback:
                outcome = "no_replica"
                return None
            message.overrides = prefill_overrides(asked.members)
            call = self._call(target, message)
            replies = [reply async for reply in call]
            status, body = _status_of(replies[:1]), b"".join(reply.data for reply in replies)
            if status >= 400:
                return self._whole(status, body, replies[0].content_type)
            message.overrides = decode_overrides(body)
            outcome = "done" if message.overrides else "nothing_to_hand_over"
        except Unavailable as error:  # also one that went away: what it has read is nothing that a client was told
            if not self._gateway.settings.prefill_fallback:
                raise
            message.overrides = ""
            outcome = "no_replica" if isinstance(error, NoReplica) else "unavailable"
        except ValueError as error:
            told = f"{target.service}: the prefill service did not answer with JSON: {error}; look at its log"
            raise PierheadError(told) from error
        finally:
            self._gateway.metrics.prefill.inc((route.base, route.service, outcome))
        return None

    # ---- the answer

    async def _relay(self, call: Any, asked: Asked) -> web.StreamResponse:
        """Pass on what the service answers."""
        first: LLMReply | None = await anext(call, None)
        self._give_room_back()
        if first is None:
            raise Unavailable(f"{self._request.path}: the service answered with nothing; look at its log")
        status = _status_of([first])
        self._meter.begun = status < 400
        if status < 400 and _is_stream(first, asked.stream):
            return await self._stream(call, first, status)
        self._meter.note(first, time.monotonic())
        pieces = [first.data]
        async for reply in call:
            self._meter.note(reply, time.monotonic())
            pieces.append(reply.data)
        return self._whole(status, b"".join(pieces), first.content_type)

    def _whole(self, status: int, body: bytes, content_type: str) -> web.Response:
        return web.Response(
            status=status, body=body, headers={**self._headers, hdrs.CONTENT_TYPE: content_type or JSON}
        )

    async def _stream(self, call: Any, first: LLMReply, status: int) -> web.StreamResponse:
        """Write what comes, as it comes: what is there already goes together, nothing waits for more. To a client that
        keeps up it is written in the turn of the loop in which it comes; this task hears of the end.
        """
        headers = {**self._headers, hdrs.CONTENT_TYPE: first.content_type or EVENTS, hdrs.CACHE_CONTROL: "no-cache"}
        response = EventResponse(status=status, headers=headers)
        self._meter.streamed = True
        writer = await response.prepare(self._request)
        if writer is None:
            raise ConnectionResetError("the response has ended already")
        reply = first
        try:
            await writer.write(self._noted([reply, *call.read_ready()]))
            direct = direct_writer(writer)

            def pass_on(replies: list[LLMReply]) -> bool:
                assert direct is not None  # noqa: S101
                return direct.write(self._noted(replies))

            while True:
                if direct is not None:
                    call.deliver(pass_on)
                reply = await anext(call)
                await writer.write(self._noted([reply, *call.read_ready()]))
        except StopAsyncIteration:
            await response.write_eof()
        except (Exception, asyncio.CancelledError) as error:
            known = self._known(error)
            if known is None:
                raise
            self._failed(known)
            await self._end(response, error_event(known.kind, known.message))
        return response

    def _noted(self, replies: list[LLMReply]) -> bytes:
        """What they hold, once it is counted."""
        note, at = self._meter.note, time.monotonic()
        for reply in replies:
            note(reply, at)
        return replies[0].data if len(replies) == 1 else b"".join([reply.data for reply in replies])

    async def _end(self, response: web.StreamResponse, last: bytes) -> None:
        """Write the last event. A client that takes nothing any more is cut off: its time is over already."""
        try:
            async with asyncio.timeout(LAST_EVENT_S):
                await response.write_eof(last)
        except (TimeoutError, asyncio.CancelledError):
            # The latter also when nobody cancels: aiohttp waits for the same future as the write that was given up.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client did not take the last event of its stream") from None

    def _failed(self, error: PierheadError) -> None:
        """A stream that had begun well has ended with `error`."""
        self._code = str(self._status(error))
        visit = self._visit
        if visit is not None:
            visit.outcome = self._code

    # ---- its end

    def _known(self, error: BaseException) -> PierheadError | None:
        """What to tell the client of `error`; None when nobody is there to be told."""
        transport, visit = self._request.transport, self._visit
        if transport is None or transport.is_closing():
            return None
        if visit is None:
            return error if isinstance(error, PierheadError) else None
        return visit.known(error, f"POST {self._request.path}")

    def _status(self, error: PierheadError) -> int:
        """The HTTP status that the runtime gives it."""
        visit = self._visit
        if visit is not None and isinstance(error, Backpressure):
            return visit.edge.settings.backpressure_status_code
        return error.http_status

    def _account(self, code: str) -> None:
        gateway, asked, holder = self._gateway, self._asked, self._holder
        used = self._meter.used(asked, gave_up=code in GAVE_UP)
        if holder is not None and asked is not None:
            holder.limits.settle(asked.tokens, used.prompt + used.completion, gateway.clock())
        key = "" if holder is None else holder.key.name
        self._meter.count(gateway.metrics, self._route, key, code, used, time.monotonic())


def _too_large(limit: int) -> ApiError:
    message = f"the request body is larger than the {limit} bytes that this gateway takes; send less at a time"
    return ApiError(413, message, code="payload_too_large")


def _status_of(replies: list[LLMReply]) -> int:
    """The status that the first reply tells. Raises Unavailable where there is none, PierheadError for no status."""
    if not replies:
        raise Unavailable("the service answered with nothing; look at its log")
    status = replies[0].status or 200
    if not 200 <= status <= 599:
        raise PierheadError(f"the engine answered with the status {status}, which is none; look at the service's log")
    return status


def _is_stream(first: LLMReply, asked: bool) -> bool:
    """Whether an answer goes out as it comes: events, and what is no JSON, such as sound."""
    if first.content_type:
        return not first.content_type.startswith(JSON)
    return asked and not first.data.startswith(b"{")  # embeddings, say, are no events whatever was asked
