"""Shortcuts through aiohttp's private parts. Imported only where the installed version is known (`known.py`).

Nothing else in the runtime touches a private part of aiohttp. With any other version `server.py` uses aiohttp's public
interface alone, which does the same, more slowly.

    GateRunner, _Server      the gate stands around the whole application, its routing included
    ClientConnection         limits requests per turn during refusals (`intake.py`), writes short answers fast
    ShortResponses           writes short, whole responses at once
    direct_writer            writes pieces of a stream without waiting
    lendable                 the connection of a stream, for another process to write to
    EventResponse            sends its head with its first event
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from email.utils import formatdate
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import aiohttp
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11
from aiohttp.http_writer import StreamWriter, _serialize_headers

from pierhead.edge.edge import Edge
from pierhead.http.answers import plain_answer
from pierhead.http.constants import MALFORMED, RUNNER_OPTIONS
from pierhead.http.gate import VISIT, Gate, JsonRequest, response_of
from pierhead.http.intake import Intake
from pierhead.request import REQUEST_ID_KEY, new_request_id

MAX_QUOTED = 200
"""Characters of a malformed request that its answer repeats."""

# ---- whether it may be used


def is_untouched() -> bool:
    """Whether the functions that this module bypasses are aiohttp's own: tracers replace them."""
    return _are_aiohttps_own(
        (
            web.RequestHandler.finish_response,
            web.StreamResponse.prepare,
            web.StreamResponse.write_eof,
            web.Response._start,
            web.Response.write_eof,
        )
    )


def _are_aiohttps_own(functions: Iterable[Any]) -> bool:
    return all(type(each) is FunctionType and Path(each.__code__.co_filename).parent == _PLACE for each in functions)


_PLACE = Path(aiohttp.__file__).parent

# ---- the gate around an application


class Request(JsonRequest):
    """A request with a reference to its gate."""

    ATTRS = JsonRequest.ATTRS | {"gate"}
    gate: InnerGate | None = None

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Called by aiohttp before a response's headers are sent."""
        if self.gate is not None:  # None: an answer to bytes that were no request
            self.gate.prepare(self, response)
        await super()._prepare_hook(response)


class InnerGate(Gate):
    """A gate around an application and its routing: a refused request is never routed."""

    def __init__(self, app: web.Application, edge: Edge) -> None:
        super().__init__(app, edge)
        self.intake = Intake()
        self.short: ShortResponses | None = None
        """None if the application has a signal for each response before its head is written."""

    def enter_by(self, application: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        """Set the handler of the application, which has been started."""
        self._application = application
        if not _sees_responses(self._app):
            self.short = ShortResponses()

    async def serve(self, base: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        request = cast("Request", base)  # created by our server's factory
        request.gate = self
        return await self.handle(request, self._application)

    def route(self, request: web.Request) -> web.AbstractRoute | None:
        """See Gate. `request.match_info` raises where there is none."""
        match = request._match_info
        return None if match is None else match.route

    async def resolve(self, request: web.Request) -> None:
        """See Gate."""
        request._match_info = await self._app.router.resolve(request)

    def refused(self) -> None:
        """See Gate."""
        self.intake.refused()

    def malformed(self, why: str) -> web.Response:
        """The answer to bytes that are no request; the connection is then closed."""
        request_id = new_request_id()
        self._edge.finished(MALFORMED, "400", 0.0, request_id)
        message = f"this is not an HTTP request: {' '.join(why.split())[:MAX_QUOTED]}"
        response = response_of(plain_answer(400, "bad_request", message, request_id, error_body=self._error_body))
        response.headers[REQUEST_ID_KEY] = request_id
        response.force_close()
        return response

    def sockets_moved(self, sockets: Collection[web.WebSocketResponse]) -> int:
        """See Gate. aiohttp's count of a WebSocket's unflushed bytes changes whenever the WebSocket sends."""
        return sum(getattr(getattr(each, "_writer", None), "_output_size", 0) for each in sockets)


def _sees_responses(app: web.Application) -> bool:
    """Whether the application, or one inside it, has a signal for each response before it is sent."""
    return bool(app.on_response_prepare) or any(_sees_responses(inner) for inner in app._subapps)


class GateRunner(web.AppRunner):
    """Runs an application behind a gate, with our own connections."""

    __slots__ = ("gate",)

    def __init__(self, app: web.Application, edge: Edge) -> None:
        self.gate = InnerGate(app, edge)
        super().__init__(app, **RUNNER_OPTIONS)

    async def _make_server(self) -> web.Server:
        inner = await super()._make_server()
        self.gate.enter_by(inner.request_handler)
        return _Server(self.gate, inner)


class _Server(web.Server):
    """aiohttp's server, with a gate before its handler and with our own connections."""

    def __init__(self, gate: InnerGate, inner: web.Server) -> None:
        super().__init__(
            gate.serve,
            request_factory=partial(cast("Any", inner.request_factory), _cls=Request),
            handler_cancellation=inner.handler_cancellation,
            **inner._kwargs,
        )
        self._gate = gate

    def __call__(self) -> web.RequestHandler:
        return ClientConnection(self, self._gate, loop=self._loop, **self._kwargs)


class ClientConnection(web.RequestHandler):
    """One connection of an `AiohttpListener`."""

    __slots__ = ("_gate", "_intake", "_short", "held")

    def __init__(self, server: web.Server, gate: InnerGate, **options: Any) -> None:
        super().__init__(server, **options)
        self._gate = gate
        self._intake = gate.intake
        self._short = gate.short
        self.held = b""

    def data_received(self, data: bytes) -> None:
        """Called with the bytes read from the socket."""
        intake = self._intake
        if intake.left:
            intake.left -= 1
            super().data_received(data)
        elif data:
            intake.hold(self, data)
        else:  # from aiohttp itself, so that its parser continues with its buffer
            super().data_received(data)

    def receive(self, data: bytes) -> None:
        """See intake.Source: process bytes that were held."""
        super().data_received(data)

    def stop_reading(self) -> None:
        """See intake.Source; aiohttp may have stopped reading for its own reasons."""
        if self.transport is not None:
            self.transport.pause_reading()

    def continue_reading(self) -> None:
        """See intake.Source."""
        if self.transport is not None and not (self._reading_paused or self._buffer_paused):
            self.transport.resume_reading()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the gate's response. Returns the response, and whether the client had left."""
        if (
            resp.__class__ is web.Response
            and not (self._upgraded or self._paused or request._post)
            and self._short is not None
            and (visit := request.get(VISIT)) is not None
            and self._short.write(cast("Request", request), resp, visit.request_id)
        ):
            return resp, False
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Called by aiohttp for bytes that were no request, and for exceptions that the gate has let through."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has left, or its connection was closed: no answer can be sent
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        return self._gate.malformed(message or str(exc))


# ---- short responses

SHORT_BYTES = 32 * 1024
"""Longest body in bytes: writing a longer one may have to wait for the client."""

_WITHOUT_BODY = frozenset((*range(100, 200), 204, 205, 304))

_WITHOUT_BODY_BY_METHOD = frozenset((hdrs.METH_HEAD, hdrs.METH_CONNECT))

_NOT_OURS = (
    hdrs.CONTENT_LENGTH, hdrs.TRANSFER_ENCODING, hdrs.CONNECTION, hdrs.DATE, hdrs.SERVER, REQUEST_ID_KEY,
)  # fmt: skip
"""Headers that are added here. If a handler has set one of them, aiohttp writes the response."""


class ShortResponses:
    """Writes short, whole responses, the most common kind, at once.

    aiohttp prepares a response in a dozen steps, because it may be a stream, compressed, chunked, or answer HTTP/1.0.
    For a short, whole response this writes the same bytes in a third of the time. Every other response is left to
    aiohttp.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._second = 0
        self._dated = ""

    def write(self, request: web.Request, response: web.Response, request_id: str) -> bool:
        """Write `response`; False if aiohttp has to, and nothing was written. Raises ValueError for bad headers."""
        body, message, transport = response._body, request._message, request.transport
        if (
            body.__class__ is not bytes
            or not 0 < len(body) <= SHORT_BYTES
            or response._keep_alive is not None
            or response._chunked
            or response._compression
            or response._cookies
            or response._eof_sent
            or response._payload_writer is not None
            or request.writer.output_size  # the handler itself has sent another response
            or response._status in _WITHOUT_BODY
            or message.should_close
            or message.method in _WITHOUT_BODY_BY_METHOD
            or message.version != HttpVersion11
            or transport is None
            or transport.is_closing()
        ):
            return False
        headers = response._headers
        typed = hdrs.CONTENT_TYPE in headers
        if (not typed or len(headers) > 1) and any(name in headers for name in _NOT_OURS):
            return False
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._dated = f"Date: {formatdate(second, usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n"
        added = (
            f"Content-Length: {len(body)}\r\n{'' if typed else _UNTYPED}{self._dated}"
            f"{REQUEST_ID_KEY}: {request_id}\r\n\r\n"
        )
        head = _serialize_headers(f"HTTP/1.1 {response._status} {response._reason}", headers)
        written = b"".join((head[:-2], added.encode(), body))
        transport.write(written)
        # As aiohttp leaves them.
        request.writer.output_size += len(written)
        response._body_length = len(written)
        response._keep_alive = response._eof_sent = True
        return True


_UNTYPED = "Content-Type: application/octet-stream\r\n"


# ---- responses that stream


def direct_writer(writer: AbstractStreamWriter) -> Callable[[bytes], bool] | None:
    """What writes pieces of a stream in the turn of the event loop in which they come: `write(data)`.

    aiohttp's writer has to be awaited, because a client may be slow. For a client that keeps up, this writes the same
    bytes without waking a task. It returns whether the client does: if not, `await writer.write(...)` has to follow,
    which waits, or raises when the client has gone.
    `writer`: of a response whose first piece was written. None where aiohttp compresses, or does not chunk.
    """
    if not _writers_are_untouched() or writer.__class__ is not StreamWriter:
        return None
    ours = cast("Any", writer)
    protocol = ours.protocol

    def write(data: bytes) -> bool:
        transport = protocol.transport
        if transport is None or transport.is_closing():
            return False
        if data:  # an empty chunk would be the end
            chunk = b"%x\r\n%b\r\n" % (len(data), data)
            ours.output_size += len(chunk)
            ours.buffer_size += len(chunk)  # so that aiohttp's own next write waits when needed
            transport.write(chunk)
        return not protocol._paused

    plain = (
        ours.chunked
        and ours.length is None
        and ours._compress is None
        and ours._on_chunk_sent is None
        and getattr(ours, "on_body_write", None) is None  # 3.14.0 has none
        and ours._headers_buf is None
        and not ours._eof
    )
    return write if plain else None


def lendable(writer: AbstractStreamWriter) -> int | None:
    """The descriptor of a stream's connection, to which another process may write the next chunks.

    None where `direct_writer` has nothing, where the connection is encrypted, or while bytes wait to be written.
    """
    transport = cast("Any", writer).protocol.transport if direct_writer(writer) is not None else None
    if transport is None or transport.is_closing() or transport.get_write_buffer_size():
        return None
    if transport.get_extra_info("sslcontext") is not None:
        return None
    return cast("int", transport.get_extra_info("socket").fileno())


@cache
def _writers_are_untouched() -> bool:
    return _are_aiohttps_own(
        (StreamWriter.write, StreamWriter._write_chunked_payload, StreamWriter._writelines, StreamWriter.drain)
    )


class EventResponse(web.StreamResponse):
    """A response whose head goes with its first event, in one packet."""

    _send_headers_immediately = False  # as in web.Response
