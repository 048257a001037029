"""The edge around an aiohttp application, as a middleware. Uses aiohttp's public interface only.

If the installed aiohttp is a known version, `inside.py` puts the same gate around the whole application.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from pierhead.deadlines import Deadlines
from pierhead.edge.edge import UNMATCHED, Edge
from pierhead.errors import Backpressure, BadRequest, BodyTimeout, Draining
from pierhead.http.answers import Answer, ErrorBody, error_answer, plain_answer
from pierhead.http.constants import CLIENT_LEFT, INTERNAL_ERROR, SERVICE_RESTART
from pierhead.http.errors import ERROR_BODY, ERROR_BODY_HERE, ERROR_HEADERS
from pierhead.http.visit import Visit
from pierhead.json_data import not_json
from pierhead.request import REQUEST_ID_KEY

logger = logging.getLogger("pierhead")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

VISIT: Final[web.RequestKey[Visit]] = web.RequestKey("pierhead_visit", Visit)
"""The visit of a request that a replica serves."""


def on_request_end(request: web.Request, ended: Callable[[str], None]) -> None:
    """Call `ended(status)` at the end of an aiohttp request, with the HTTP status that metrics count. It may differ
    from the status that was sent: "504" for a stream that reached its deadline, "499" if the client left. Does nothing
    for a request outside a replica (tests with aiohttp's own server).
    """
    visit = request.get(VISIT)
    if visit is not None:
        visit.ended = ended


class JsonRequest(web.Request):
    """A request whose body is read as JSON only where it is sent as JSON."""

    async def json(self, *, loads: Callable[[str], Any] = json.loads) -> Any:
        """See aiohttp. Raises BadRequest for a body with another Content-Type, or none."""
        if problem := not_json(self.headers.get(hdrs.CONTENT_TYPE)):
            raise BadRequest(problem)
        return await super().json(loads=loads)


class Gate:
    """Every request of one application passes through this."""

    def __init__(self, app: web.Application, edge: Edge) -> None:
        self._app = app
        self._edge = edge
        self._error_body = app.get(ERROR_BODY)
        self._deadlines = Deadlines.current()
        self._labels: dict[tuple[web.AbstractRoute, str], str] = {}
        self._sockets: WeakSet[web.WebSocketResponse] = WeakSet()
        self._closing: set[asyncio.Task[bool]] = set()
        self._streams: WeakKeyDictionary[web.StreamResponse, AbstractStreamWriter] = WeakKeyDictionary()

    def join(self) -> None:
        """Become the application's outermost middleware. Called before it is started."""

        @web.middleware
        async def enter(request: web.Request, handler: Handler) -> web.StreamResponse:
            request.__class__ = JsonRequest  # aiohttp has no public way to make requests of another class
            return await self.handle(request, handler)

        async def prepare(request: web.Request, response: web.StreamResponse) -> None:
            self.prepare(request, response)

        self._app.middlewares.insert(0, enter)
        self._app.on_response_prepare.append(prepare)

    async def handle(self, request: web.Request, inside: Handler) -> web.StreamResponse:
        """Answer one request; `inside` is the handler behind the gate."""
        read = request.headers.get
        request[VISIT] = visit = Visit(read, self._edge)
        code = CLIENT_LEFT  # what is counted when cancellation passes through
        draining = self._edge.admission.draining
        try:
            try:
                if draining:
                    _refuse_upgrade(request)
                visit.begin(read, self._deadlines)
                if not request.content.is_eof():
                    visit.expect_body(self._deadlines, request.content.is_eof, partial(_is_read, request))
                response = await inside(request)
                # The class is compared first: isinstance() with an abstract class costs as much as all the rest.
                if response.__class__ is not web.Response and not isinstance(response, web.StreamResponse):
                    _reject(response, self.label(request))
            except BaseException as error:
                response = await self._failed(request, error, visit)
            code = str(response.status)
        finally:
            visit.end(self.label(request), code)
        if response.__class__ is not web.Response and isinstance(response, web.HTTPException):
            raise response  # aiohttp expects such responses to be raised
        if draining or self._edge.admission.draining or response.status == BodyTimeout.http_status:
            response.force_close()
        return response

    def label(self, request: web.Request) -> str:
        """The declared route (`GET /items/{id}`): raw paths as labels would grow without bound."""
        route = self.route(request)
        if route is None:
            return UNMATCHED
        key = (route, request.method)
        label = self._labels.get(key)
        if label is None:
            resource = route.resource
            if resource is None:
                return UNMATCHED  # its routes are made for each request
            if request.method not in hdrs.METH_ALL:
                return f"OTHER {resource.canonical}"
            label = self._labels[key] = f"{request.method} {resource.canonical}"
        return label

    def route(self, request: web.Request) -> web.AbstractRoute | None:
        """The route of a request; None where the router itself has failed."""
        return request.match_info.route

    async def resolve(self, request: web.Request) -> None:
        """Find the route of a refused request, which is counted under its route, too."""

    def refused(self) -> None:
        """A request was refused because the replica is full."""

    def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the request's id to the head of a response, or of a stream, which is about to be sent."""
        visit = request.get(VISIT)
        if visit is None:
            return
        response.headers[REQUEST_ID_KEY] = visit.request_id
        if response.__class__ is web.Response:
            return
        if isinstance(response, web.WebSocketResponse):
            if self._edge.admission.draining:  # a drain that has begun would not close this one
                raise _drains()
            self._sockets.add(response)
            visit.socket = response
            visit.live_on()
            return
        self._streams[response] = request.writer
        if request.method == hdrs.METH_HEAD and not isinstance(response, web.Response):
            # A handler that streams would write a body into the next response on the connection.
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"

    def moved(self) -> int:
        """Bytes sent by the current streams, counted on demand, so that writing costs nothing extra.

        How much a WebSocket has sent is unknown: while there are any, work counts as moving.
        """
        return self.sockets_moved(self._sockets) + sum(writer.output_size for writer in self._streams.values())

    def sockets_moved(self, sockets: Collection[web.WebSocketResponse]) -> int:
        """The WebSockets' part of `moved`."""
        return time.monotonic_ns() if sockets else 0

    def drain(self) -> None:
        """Close every WebSocket: unlike requests they do not end by themselves. Clients reconnect to other replicas."""
        for socket in list(self._sockets):
            task = asyncio.ensure_future(_restart(socket))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def closed(self) -> None:
        """Return once every WebSocket is closed."""
        if self._closing:
            await asyncio.wait(self._closing)

    async def _failed(self, request: web.Request, error: BaseException, visit: Visit) -> web.StreamResponse:
        """The response for an exception of the handler."""
        if not visit.entered:
            await self.resolve(request)
        in_socket = isinstance(visit.socket, web.WebSocketResponse) and visit.socket.prepared
        has_begun = in_socket or request.writer.output_size > 0
        if isinstance(error, web.HTTPException) and not has_begun:
            # A redirect is an answer, not an error.
            if error.status < 400:
                return error
            return _from_http_exception(request, error, visit.request_id, self._error_body)
        label = self.label(request)
        if isinstance(error, web.RequestPayloadError):
            why = str(error).removeprefix("400, message:").strip()
            error = BadRequest(f"the request body cannot be read: {why}")
        known = None if _left(request, error, visit) else visit.known(error, label)
        if known is None:
            raise error
        if isinstance(visit.socket, web.WebSocketResponse) and in_socket:
            await visit.socket.close(code=INTERNAL_ERROR, message=known.kind.encode())
            return visit.socket
        if has_begun:
            # Part of the response was sent; an error response after it would be read as its body. Only closing the
            # connection can still report the failure.
            logger.error("%s failed after its response had begun: %s", label, known.message)
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(known.message) from error
        if isinstance(known, Backpressure):
            self.refused()
        error_body = request.get(ERROR_BODY_HERE, self._error_body)
        response = response_of(error_answer(known, visit.request_id, self._edge.settings, error_body))
        response.headers.update(request.get(ERROR_HEADERS, {}))
        return response


def _is_read(request: web.Request) -> bool:
    """Whether the server reads the body: not while the handler reads more slowly than the client sends."""
    return request.transport is not None and request.transport.is_reading()


def _refuse_upgrade(request: web.Request) -> None:
    """A draining replica accepts requests, which end, but no WebSocket, which it would have to close at once."""
    if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
        raise _drains()


def _drains() -> Draining:
    return Draining("this replica is draining; connect again")


def _left(request: web.Request, error: BaseException, visit: Visit) -> bool:
    """Whether `error` comes from writing to a client that has left, which is no failure of ours."""
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
    """The answer for an HTTP exception of aiohttp or of a handler, in our error form, with its headers."""
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
    response = response_of(plain_answer(status, code, message, request_id, error_body=error_body))
    for name, value in error.headers.items():
        if name not in (hdrs.CONTENT_TYPE, hdrs.CONTENT_LENGTH):
            response.headers.add(name, value)
    return response


def response_of(answer: Answer) -> web.Response:
    """The response, without the request's id: `Request` and `ShortResponses` add it to every head."""
    headers = {name: value for name, value in answer.headers.items() if name != REQUEST_ID_KEY}
    return web.Response(status=answer.status, headers=headers, body=answer.body)
