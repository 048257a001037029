"""One request from its arrival to the end of its answer.

body -> model -> [prefill] -> service -> charge -> answer: whole, or events as they come
                                                      `--> accounts, however it ended
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from aiohttp import hdrs, web
from pierhead import has_replica, http_errors, on_request_end, set_model_id, sse
from pierhead.errors import Backpressure, NoReplica, PierheadError, Unavailable
from pierhead.llm.gateway.body.body import NOTHING_ASKED, RequestParts, read_body
from pierhead.llm.gateway.endpoints import INVOCATION, STORED, RequestKind, invoked, is_path
from pierhead.llm.gateway.errors import (
    EVENTS,
    JSON,
    ApiError,
    answer_error,
    anthropic_body,
    anthropic_runtime_error_body,
    error_event,
    no_model,
    unknown_model,
    unknown_path,
    wrong_form,
)
from pierhead.llm.gateway.keys import TOKENS, checked_key
from pierhead.llm.gateway.meter import Meter, Used
from pierhead.llm.gateway.models.model_map import ModelRoute, Site
from pierhead.llm.gateway.models.prefill import decode_overrides, prefill_overrides
from pierhead.llm.v1.llm_pb2 import LLMReply, LLMRequest
from pierhead.request import current_request

if TYPE_CHECKING:
    from pierhead.llm.gateway.gateway import Gateway

FALLBACK = "x-pierhead-fallback"
"""Header of answers: the model that has answered in place of the one that was asked for."""

GAVE_UP = ("499", "504")
"""Statuses of requests that the client ended: it left, or its deadline passed."""


class ClientExchange:
    """One request of a client."""

    __slots__ = (
        "_asked", "_charged", "_endpoint", "_gateway", "_headers", "_key", "_meter", "_request", "_room", "_route",
    )  # fmt: skip

    def __init__(self, gateway: Gateway, request: web.Request, endpoint: RequestKind) -> None:
        self._gateway = gateway
        self._request = request
        self._endpoint = endpoint
        self._meter = Meter(time.monotonic())
        self._key = checked_key(request.headers)
        self._charged = 0
        """Tokens that were counted before the end, for the head of the answer."""
        self._asked: RequestParts | None = None
        """Set once the request may go to its model."""
        self._route: ModelRoute | None = None
        self._headers: dict[str, str] = {}
        """Of every answer."""
        self._room = 0
        """Bytes of `Gateway.body_bytes` that this request has taken."""

    async def answer(self) -> web.StreamResponse:
        """The response. Raises the errors that the runtime handles: its own, and the client's leaving."""
        on_request_end(self._request, self._account)
        if self._endpoint.anthropic:
            self._request[http_errors.ERROR_BODY_HERE] = anthropic_runtime_error_body
        self._gateway.ongoing += 1
        try:
            return await self._run()
        except ApiError as error:
            return answer_error(error, self._headers, anthropic=self._endpoint.anthropic)
        finally:
            self._gateway.ongoing -= 1
            self._free_room()

    # ---- before the service

    async def _run(self) -> web.StreamResponse:
        request = self._request
        site = self._gateway.site(request)
        path = request.path.removeprefix(site.prefix)
        if not self._endpoint.path and not is_path(path):
            raise unknown_path(path)
        content_type = request.headers.get(hdrs.CONTENT_TYPE, "")
        if self._endpoint is STORED:
            content_type, body, asked = "", b"" if request.method == hdrs.METH_GET else b"{}", NOTHING_ASKED
            if len(self._gateway.names_for(self._key, site)) != 1:
                raise unknown_path(path)  # it could be any model's
        else:
            body = await self._read()
            hosts = self._gateway.settings.media_hosts
            asked = read_body(body, content_type, messages=self._endpoint.messages, media_hosts=hosts)
        if self._endpoint is INVOCATION:
            self._endpoint = self._invoked(asked)
        endpoint = self._endpoint
        route = self._find(asked.model, site)
        self._asked = asked
        route = self._available(route)
        # Replicas are chosen by the adapter, so the client's own header must not count.
        set_model_id(route.adapter or None)
        message = LLMRequest(
            body=asked.body_for(body, route.model),
            path=endpoint.path or (request.path_qs.removeprefix(site.prefix) if endpoint is STORED else path),
            model=route.model,
            content_type="" if asked.members else content_type,
            routing_text=asked.prompt.beginning,
        )
        if route.prefill is not None and endpoint.generates:
            refused = await self._prefill(message, route.prefill, asked, route)
            if refused is not None:
                return refused
        message.lends = asked.stream
        self._meter.asked = time.monotonic()
        call = self._call(route.service, message)
        del body, message  # frees their memory as soon as the call no longer needs them
        try:
            return await self._relay(call, asked, route.service)
        finally:
            call.cancel()

    async def _read(self) -> bytes:
        """The body. Raises ApiError; Backpressure if the bodies of all requests leave no room for it.

        Admission bounds the requests, and a setting the size of each; the product exceeds any machine's memory. Room is
        taken as bytes arrive: a request that announces a large body and sends nothing takes none.
        """
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
        limit = self._gateway.settings.max_bodies_bytes
        if self._gateway.body_bytes + size > limit:
            raise Backpressure(
                f"the bodies of all requests that wait for an answer have the {limit} bytes that this gateway "
                "keeps for them; ask again in a moment"
            )
        self._gateway.body_bytes += size
        self._room += size

    def _free_room(self) -> None:
        self._gateway.body_bytes -= self._room
        self._room = 0

    def _invoked(self, asked: RequestParts) -> RequestKind:
        kind = invoked(asked.members)
        if kind is None:
            message = "the body: expected messages, a prompt, an input, text_1 and text_2, or a query and documents"
            raise ApiError(400, message, code="missing_required_parameter")
        return kind

    def _find(self, name: str, site: Site) -> ModelRoute:
        """The model's route, if this client may use it; "" = the only model that it may use there."""
        if not name:
            models = self._gateway.names_for(self._key, site)
            if len(models) != 1:
                raise no_model(models)
            name = models[0]
        route = self._gateway.models.find(name)
        if route is None or site.model not in ("", route.base):
            raise unknown_model(name)
        self._route = route
        if not self._key.may_use((name, route.model)):
            message = f"The API key {self._key.name} does not have access to the model `{name}`; its scope is another."
            raise ApiError(403, message, code="model_not_allowed", param="model")
        return route

    def _available(self, route: ModelRoute) -> ModelRoute:
        """The route that the request takes: the model's, or its fallback's, which the answer's head then names."""
        taken = self._gateway.available(route)
        if taken is not route:
            self._route = taken
            self._request[http_errors.ERROR_HEADERS] = self._headers = {FALLBACK: taken.model}
        return taken

    def _call(self, service: str, message: LLMRequest) -> Any:
        return getattr(self._gateway.stubs[service], self._endpoint.rpc)(message)

    async def _prefill(
        self, message: LLMRequest, service: str, asked: RequestParts, route: ModelRoute
    ) -> web.StreamResponse | None:
        """Let `service` read the prompt, and add the result to `message`. Returns the service's answer on an error."""
        outcome = "error"
        try:
            if asked.choices > 1:  # the transferred state is that of one sequence
                outcome = "several_choices"
                return None
            if not has_replica(service) and self._gateway.settings.prefill_fallback:
                outcome = "no_replica"
                return None
            message.overrides = prefill_overrides(asked.members)
            replies = [reply async for reply in self._call(service, message)]
            status, body = _status_of(replies[:1]), b"".join(reply.data for reply in replies)
            if status >= 400:
                return self._whole(status, body, replies[0].content_type)
            message.overrides = decode_overrides(body)
            outcome = "done" if message.overrides else "nothing_to_hand_over"
        except Unavailable as error:  # also a replica that died: the client has received nothing yet
            if not self._gateway.settings.prefill_fallback:
                raise
            message.overrides = ""
            outcome = "no_replica" if isinstance(error, NoReplica) else "unavailable"
        except ValueError as error:
            text = f"{service}: the prefill service did not answer with JSON: {error}; look at its log"
            raise PierheadError(text) from error
        finally:
            self._gateway.metrics.prefill.inc((route.base, route.service, outcome))
        return None

    # ---- the answer

    async def _relay(self, call: Any, asked: RequestParts, service: str) -> web.StreamResponse:
        """Pass on the service's answer. Raises ApiError for one in another form than the client asked for."""
        first: LLMReply | None = await anext(call, None)
        self._free_room()
        if first is None:
            raise Unavailable(f"{self._request.path}: the service's answer is empty; look at its log")
        status, content_type = _status_of([first]), _content_type(first)
        expected = EVENTS if asked.stream else JSON
        if status < 400 and self._endpoint.streams and not content_type.startswith(expected):
            raise wrong_form(f"{self._endpoint.path}: the service {service}", content_type, stream=asked.stream)
        self._meter.begun = status < 400
        if status < 400 and not content_type.startswith(JSON):
            self._meter.streamed = True
            return await sse(
                self._request,
                _Begun(first, call),
                self._noted,
                status=status,
                headers={**self._headers, **self._charge(), hdrs.CONTENT_TYPE: content_type},
                on_error=lambda error, _: error_event(
                    error.http_status, error.kind, error.message, anthropic=self._endpoint.anthropic
                ),
                lend=call.lend if first.borrows else None,
            )
        pieces = [self._noted(first), *[self._noted(reply) async for reply in call]]
        return self._whole(status, b"".join(pieces), first.content_type)

    def _noted(self, reply: LLMReply) -> bytes:
        """The bytes of a reply, once it is counted."""
        self._meter.note(reply, time.monotonic())
        return reply.data

    def _whole(self, status: int, body: bytes, content_type: str) -> web.Response:
        if status >= 400 and self._endpoint.anthropic:
            body = anthropic_body(status, body)
        charge = self._charge(self._used().charged)
        headers = {**self._headers, **charge, hdrs.CONTENT_TYPE: content_type or JSON}
        return web.Response(status=status, body=body, headers=headers)

    def _used(self, *, gave_up: bool = False) -> Used:
        return self._meter.used(None if self._endpoint.is_free else self._asked, gave_up=gave_up)

    def _charge(self, tokens: int = 0) -> dict[str, str]:
        """The header that tells HAProxy what the request's key has used, with these tokens; none without a key."""
        if not self._key.name:
            return {}
        self._charged = tokens
        self._gateway.charges.add(self._key.name, tokens)
        return {TOKENS: str(self._gateway.charges.take(self._key.name))}

    def _account(self, code: str) -> None:
        """Count the request, which has ended. `code`: the HTTP status that it ended with."""
        gateway, key = self._gateway, self._key.name
        used = self._used(gave_up=code in GAVE_UP)
        if key:
            gateway.charges.add(key, used.charged - self._charged)
        self._meter.count(gateway.metrics, self._route, key, code, used, time.monotonic())
        if (request := current_request()) is not None and request.trace is not None:
            self._meter.add_to(request.trace, used)


class _Begun:
    """A call whose first reply was read already, as a source for `sse`."""

    def __init__(self, first: LLMReply, call: Any) -> None:
        self._first = first
        self._call = call
        self.read_ready = call.read_ready
        self.deliver = call.deliver
        self.cancel = call.cancel

    async def __aiter__(self) -> AsyncIterator[LLMReply]:
        yield self._first
        async for reply in self._call:
            yield reply


def _too_large(limit: int) -> ApiError:
    message = f"the request body is larger than the {limit} bytes that this gateway takes; send less at a time"
    return ApiError(413, message, code="payload_too_large")


def _status_of(replies: list[LLMReply]) -> int:
    """The status of the first reply. Raises Unavailable if there is no reply, PierheadError for an invalid status."""
    if not replies:
        raise Unavailable("the service's answer is empty; look at its log")
    status = replies[0].status or 200
    if not 200 <= status <= 599:
        raise PierheadError(f"the engine answered with the invalid status {status}; look at the service's log")
    return status


def _content_type(first: LLMReply) -> str:
    """Of an answer: what its first reply says, else JSON or events. All but JSON is streamed, such as sound."""
    return first.content_type or (JSON if first.data.lstrip().startswith((b"{", b"[")) else EVENTS)
