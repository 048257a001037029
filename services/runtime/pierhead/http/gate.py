"""The edge around an aiohttp application: every request passes it, routing included."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn, cast
from weakref import WeakKeyDictionary, WeakSet

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from pierhead.deadlines import Deadlines
from pierhead.edge.edge import Edge
from pierhead.errors import Backpressure, BadRequest, Draining
from pierhead.http.answers import Answer, ErrorBody, error_answer, plain_answer
from pierhead.http.constants import CLIENT_LEFT, INTERNAL_ERROR, MALFORMED, SERVICE_RESTART
from pierhead.http.errors import ERROR_BODY, ERROR_HEADERS
from pierhead.http.intake import Intake
from pierhead.http.known import is_known
from pierhead.http.routes import KnownRoute, Routes
from pierhead.http.short_response import ShortResponses
from pierhead.http.visit import Visit
from pierhead.request import REQUEST_ID_KEY, new_request_id

logger = logging.getLogger("pierhead")

MAX_TOLD = 200
"""Characters of a malformed request that its answer repeats."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Request(web.Request):
    """A request that knows its visit."""

    ATTRS = web.Request.ATTRS | {"gate", "visit"}
    gate: Gate
    visit: Visit | None = None

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Called by aiohttp before a response's headers are sent, those of streams included: each names its request.

        The application's signal `on_response_prepare` would be the public way, for two more frames per request.
        """
        visit = self.visit
        if visit is not None:
            response.headers[REQUEST_ID_KEY] = visit.request_id
            if response.__class__ is not web.Response:
                self.gate.prepare(self, response, visit)
        await super()._prepare_hook(response)


class Gate:
    """What every request of one application passes."""

    def __init__(self, app: web.Application, edge: Edge) -> None:
        self._app = app
        self._edge = edge
        self._error_body = app.get(ERROR_BODY)
        self.intake = Intake()
        self.short: ShortResponses | None = None
        """None where the application wants to see each response before its head is written."""
        self._deadlines = Deadlines.current()
        self._inside: Handler = _nowhere
        self._routes = Routes(app, remember=False)
        self._sockets: WeakSet[web.WebSocketResponse] = WeakSet()
        self._closing: set[asyncio.Task[bool]] = set()
        self._streams: WeakKeyDictionary[web.StreamResponse, AbstractStreamWriter] = WeakKeyDictionary()

    def enter_by(self, inside: Handler) -> None:
        """Set the handler of the application, which has been started."""
        self._inside = inside
        known = is_known()
        self._routes = Routes(self._app, remember=known)
        if known and not _sees_responses(self._app):
            self.short = ShortResponses()

    async def handle(self, base: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        request = cast("Request", base)  # our server's factory has made it
        read = request.headers.get
        request.gate = self
        request.visit = visit = Visit(read, self._edge)
        known: KnownRoute | None = None
        code = CLIENT_LEFT  # what is counted when cancellation passes through
        draining = self._edge.admission.draining
        try:
            try:
                if draining:
                    _refuse_upgrade(request)
                visit.begin(read, self._deadlines)
                known = self._routes.find(request)
                if known is not None:
                    response = await known.handler(request)
                else:
                    response = await self._inside(request)
                    self._routes.remember(request)
                # Asked by class first: an isinstance() of an abstract class costs as much as the rest of this function.
                if response.__class__ is not web.Response and not isinstance(response, web.StreamResponse):
                    _reject(response, self._routes.label(request))
            except BaseException as error:
                response = await self._failed(request, error, visit)
            code = str(response.status)
        finally:
            visit.end(known.label if known is not None else self._routes.label(request), code)
        if response.__class__ is not web.Response and isinstance(response, web.HTTPException):
            raise response  # so aiohttp wants it
        if draining or self._edge.admission.draining:
            response.force_close()
        return response

    def prepare(self, request: web.Request, response: web.StreamResponse, visit: Visit) -> None:
        """A response that is no plain one is about to begin."""
        if isinstance(response, web.WebSocketResponse):
            if self._edge.admission.draining:  # it began meanwhile: nobody would close this one
                raise _drains()
            self._sockets.add(response)
            visit.socket = response
            visit.live_on()
            return
        self._streams[response] = request.writer
        if request.method == hdrs.METH_HEAD and not isinstance(response, web.Response):
            # A handler that streams goes on to write a body, which the next request on the connection would get.
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"

    def malformed(self, why: str) -> web.Response:
        """The answer to bytes that are no request; the connection is then closed."""
        request_id = new_request_id()
        self._edge.finished(MALFORMED, "400", 0.0, request_id)
        told = " ".join(why.split())[:MAX_TOLD]
        message = f"this is not an HTTP request: {told}"
        response = _response(plain_answer(400, "bad_request", message, request_id, error_body=self._error_body))
        response.headers[REQUEST_ID_KEY] = request_id
        response.force_close()
        return response

    def moved(self) -> int:
        """Bytes of the streams under way, counted when somebody asks: writing costs nothing for it.

        Of WebSockets the library's own count of what it has not flushed: it stands still only when they do.
        """
        sockets = sum(getattr(getattr(each, "_writer", None), "_output_size", 0) for each in self._sockets)
        return sockets + sum(writer.output_size for writer in self._streams.values())

    def drain(self) -> None:
        """Close every WebSocket: unlike a request it would not end by itself. Clients connect again, elsewhere."""
        for socket in list(self._sockets):
            task = asyncio.ensure_future(_restart(socket))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def closed(self) -> None:
        """Return once no WebSocket is being closed any more."""
        if self._closing:
            await asyncio.wait(self._closing)

    async def _failed(self, request: web.Request, error: BaseException, visit: Visit) -> web.StreamResponse:
        """The response for an exception on the way to a response."""
        if not visit.entered:  # refused before it was routed; it is counted under its route all the same
            request._match_info = await self._app.router.resolve(request)
        if isinstance(error, web.HTTPException):
            # A redirect is an answer, not an error.
            if error.status < 400:
                return error
            return _from_http_exception(request, error, visit.request_id, self._error_body)
        label = self._routes.label(request)
        if isinstance(error, web.RequestPayloadError):
            why = str(error).removeprefix("400, message:").strip()
            error = BadRequest(f"the request body cannot be read: {why}")
        known = None if _left(request, error, visit) else visit.known(error, label)
        if known is None:
            raise error
        if isinstance(visit.socket, web.WebSocketResponse) and visit.socket.prepared:
            await visit.socket.close(code=INTERNAL_ERROR, message=known.kind.encode())
            return visit.socket
        if request.writer.output_size > 0:
            # Half of a response is on its way; another one behind it would be read as its body. Cutting the connection
            # is the only way left to say that it failed.
            logger.error("%s failed after its response had begun: %s", label, known.message)
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(known.message) from error
        if isinstance(known, Backpressure):
            self.intake.refused()
        response = _response(error_answer(known, visit.request_id, self._edge.settings, self._error_body))
        response.headers.update(request.get(ERROR_HEADERS, {}))
        return response


def _sees_responses(app: web.Application) -> bool:
    """Whether the application, or one inside it, has asked to be told of each response before it is sent."""
    return bool(app.on_response_prepare) or any(_sees_responses(inner) for inner in app._subapps)


async def _nowhere(_: web.BaseRequest) -> web.StreamResponse:
    raise RuntimeError("a request came before the application was started")


def _refuse_upgrade(request: web.Request) -> None:
    """A draining replica takes requests, which end, but no WebSocket, which it would have to close at once."""
    if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
        raise _drains()


def _drains() -> Draining:
    return Draining("this replica is draining; connect again")


def _left(request: web.Request, error: BaseException, visit: Visit) -> bool:
    """Whether `error` is that of writing to a client that has left: no failure of ours."""
    if not isinstance(error, ConnectionError):
        return False
    closed = isinstance(visit.socket, web.WebSocketResponse) and visit.socket.closed
    return closed or request.transport is None or request.transport.is_closing()


async def _restart(socket: web.WebSocketResponse) -> bool:
    with suppress(RuntimeError, ConnectionError):  # not yet, or no longer, open
        return await socket.close(code=SERVICE_RESTART, message=b"the replica is draining; connect again")
    return False


def _reject(found: object, label: str) -> NoReturn:
    raise TypeError(
        f"the handler of {label} returned {type(found).__name__}, expected a web.StreamResponse; is a `return` missing?"
    )


def _from_http_exception(
    request: web.Request, error: web.HTTPException, request_id: str, error_body: ErrorBody | None
) -> web.Response:
    """What aiohttp and handlers say with exceptions, in the one error shape, with the headers that belong to it."""
    status = error.status
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.client_max_size
        code = "payload_too_large"
        message = f"the request body is larger than the {limit} bytes that this service takes; send less at a time"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        code = "method_not_allowed"
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} does not take {request.method}; it takes {allowed}"
    elif isinstance(error, web.HTTPNotFound) and request.match_info.http_exception is error:
        code = "not_found"
        routes = ", ".join(sorted({resource.canonical for resource in request.app.router.resources()}))
        message = f"no route for {request.path}; this service has {routes}"
    else:
        code = error.reason.lower().replace(" ", "_").replace("-", "_")
        message = error.text or error.reason
    response = _response(plain_answer(status, code, message, request_id, error_body=error_body))
    for name, value in error.headers.items():
        if name not in (hdrs.CONTENT_TYPE, hdrs.CONTENT_LENGTH):
            response.headers.add(name, value)
    return response


def _response(answer: Answer) -> web.Response:
    """Without the request's id in its head: there `Request` and `ShortResponses` put it, for every response alike."""
    headers = {name: value for name, value in answer.headers.items() if name != REQUEST_ID_KEY}
    return web.Response(status=answer.status, headers=headers, body=answer.body)
