"""The front of an application without HAProxy: finds the service of each request by its route, and passes bytes on.

    client -> Front -> listener of the service that has the longest matching route

Each request has a connection to its service of its own, and is the last one on its client's: so the next one is routed
anew, and bodies, streams and WebSockets need no code here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from pierhead.dev.words import Words
from pierhead.edge import logs
from pierhead.http.answers import CONTENT_TYPE
from pierhead.request import REQUEST_ID_KEY, accept_id
from pierhead.settings import Settings

MOST_HEAD_BYTES: Final = 32 * 1024
HEAD_S: Final = 30.0
"""How long a client may take to send the head of a request, as for HAProxy."""
PIECE_BYTES: Final = 64 * 1024
CONNECT_S: Final = 5.0

_OURS = frozenset(("connection", "keep-alive", "proxy-connection", "x-forwarded-prefix"))
"""Headers of clients that are not passed on."""


@dataclass(slots=True)
class FrontLine:
    """The requests of one service: those that it works on, and those that wait."""

    max_ongoing: int
    max_queued: int
    """-1 = no bound."""
    timeout_s: float
    refusal_status: int = 503
    retry_after_s: float = 1.0
    waiting: int = 0
    places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.places = asyncio.Semaphore(self.max_ongoing)


@dataclass(frozen=True, slots=True)
class FrontRoute:
    """A route of `x-serve`, and where its service listens."""

    path: str
    service: str
    port: int
    line: FrontLine
    strip_prefix: bool = False

    def takes(self, path: str) -> bool:
        """Whether a path is this route's, or below it."""
        return self.path in ("/", path) or path.startswith(f"{self.path}/")

    def inner(self, path: str) -> str:
        """The path as the service sees it."""
        if not self.strip_prefix or self.path == "/":
            return path
        return f"/{path[len(self.path) :].removeprefix('/')}"


class Refusal(Exception):
    """A request that no service gets."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float = 0, **more: object) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.more = more


def route_of(service: str, words: Words, settings: Settings, port: int) -> FrontRoute:
    """The route of a service that listens at a port of this machine. Only for words that have one."""
    line = FrontLine(
        settings.max_ongoing_requests,
        words.get("max_queued_requests", -1),
        settings.request_timeout_s,
        settings.backpressure_status_code,
        settings.backpressure_retry_after_s,
    )
    return FrontRoute(words["route"], service, port, line, words.get("strip_prefix", False))


class Head:
    """The head of a request. Raises Refusal for bytes that are none."""

    def __init__(self, head: bytes) -> None:
        first, *fields = head.decode("latin-1").split("\r\n")[:-2]
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or any(":" not in each for each in fields):
            raise Refusal(400, "bad_request", "This is not a valid HTTP request: check its request line and headers.")
        self.method, target, self._version = words
        if not target.startswith("/"):  # http://host/path, as to a proxy
            target = "/" + target.partition("://")[2].partition("/")[2]
        self.path, mark, query = target.partition("?")
        self._query = mark + query
        self._fields = [(name.strip(), value.strip()) for name, _, value in (each.partition(":") for each in fields)]

    def header(self, wanted: str) -> str | None:
        """A header's value, by its name in lower case."""
        return next((value for name, value in self._fields if name.lower() == wanted), None)

    def to(self, route: FrontRoute, client: str) -> bytes:
        """The head that the service gets."""
        fields = [(name, value) for name, value in self._fields if name.lower() not in _OURS]
        upgrades = "upgrade" in (self.header("connection") or "").lower()
        fields.append(("Connection", "Upgrade" if upgrades else "close"))
        fields.append(("X-Forwarded-For", client))
        for name, value in (("X-Forwarded-Proto", "http"), ("X-Forwarded-Host", self.header("host"))):
            if value is not None and self.header(name.lower()) is None:
                fields.append((name, value))
        if route.strip_prefix and route.path != "/":
            fields.append(("X-Forwarded-Prefix", route.path))
        lines = [f"{self.method} {route.inner(self.path)}{self._query} {self._version}"]
        lines += [f"{name}: {value}" for name, value in fields]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Front:
    """Listens for HTTP, and for gRPC, which it passes on unread. Owned by one event loop."""

    def __init__(self) -> None:
        self._routes: Sequence[FrontRoute] | None = None
        self._why = ""
        self._grpc_port: int | None = None
        self._known = asyncio.Event()
        """Set once there are routes, or a reason why there are none."""
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Listen for HTTP; returns the port. Raises OSError if it cannot be opened."""
        return await self._listen(self._http, host, port)

    async def listen_grpc(self, host: str, port: int) -> int:
        """Listen for gRPC; returns the port. Raises OSError if it cannot be opened."""
        return await self._listen(self._grpc, host, port)

    def switch(self, routes: Sequence[FrontRoute], grpc_port: int | None) -> None:
        """Send requests here from now on; those in flight end where they are."""
        self._routes = sorted(routes, key=lambda route: len(route.path), reverse=True)
        self._grpc_port = grpc_port
        self._known.set()

    def fail(self, why: str) -> None:
        """Answer requests with this reason, while there is nothing to send them to."""
        self._why = why
        self._known.set()

    async def close(self) -> None:
        """Close the ports and every connection."""
        for server in self._servers:
            server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _listen(self, serve: _Serve, host: str, port: int) -> int:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - asyncio calls it in a task
            self._serving.add(task)
            try:
                await serve(reader, writer)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
                writer.transport.abort()
            finally:
                self._serving.discard(task)
                writer.close()

        server = await asyncio.start_server(connected, host, port, limit=MOST_HEAD_BYTES)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _grpc(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._known.wait()
        if self._grpc_port is not None:
            await _join(reader, writer, self._grpc_port, b"")

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head: Head | None = None
        try:
            async with asyncio.timeout(HEAD_S):
                try:
                    raw = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    raw = b"\r\n\r\n"
            head = Head(raw)
            await self._known.wait()
            route = self._route_of(head.path)
            client = str(writer.get_extra_info("peername")[0])
            await _take_place(route)
            try:
                await _join(reader, writer, route.port, head.to(route, client))
            finally:
                route.line.places.release()
        except Refusal as refusal:
            await _answer(writer, refusal, head)

    def _route_of(self, path: str) -> FrontRoute:
        if self._routes is None:
            raise Refusal(503, "not_loaded", self._why, 1)
        for route in self._routes:
            if route.takes(path):
                return route
        routes = {route.path: route.service for route in sorted(self._routes, key=lambda each: each.path)}
        there_are = f"The routes are {', '.join(routes)}." if routes else "There are no routes yet."
        raise Refusal(404, "route_not_found", f'No route takes "{path}". {there_are}', routes=routes)


_Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def _take_place(route: FrontRoute) -> None:
    """Return once the service has room for a request, as HAProxy's queue does. Raises Refusal."""
    line = route.line
    if line.places.locked() and 0 <= line.max_queued <= line.waiting:
        message = f"Every replica of {route.service} is busy and its queue is full. Nothing was done; try again later."
        raise Refusal(line.refusal_status, "queue_full", message, line.retry_after_s)
    line.waiting += 1
    try:
        async with asyncio.timeout(line.timeout_s):
            await line.places.acquire()
    except TimeoutError:
        message = f"No replica of {route.service} took the request: all are busy. Nothing was done; try again."
        raise Refusal(line.refusal_status, "overloaded", message, line.retry_after_s) from None
    finally:
        line.waiting -= 1


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, first: bytes) -> None:
    """Pass bytes on in both directions until one side closes. Raises OSError when a connection breaks."""
    async with asyncio.timeout(CONNECT_S):
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
    inner_writer.write(first)
    pipes = {
        asyncio.create_task(_pass_on(reader, inner_writer)),
        asyncio.create_task(_pass_on(inner_reader, writer)),
    }
    try:
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            if pipe.done():
                pipe.result()
    finally:
        # Cut off, not closed: where the client has left, the service sees it at once.
        inner_writer.transport.abort()
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()


async def _answer(writer: asyncio.StreamWriter, refusal: Refusal, head: Head | None) -> None:
    request_id = accept_id(head.header(REQUEST_ID_KEY) if head is not None else None)
    described = {"code": refusal.code, "message": str(refusal), **refusal.more, "request_id": request_id}
    body = json.dumps({"error": described}).encode()
    lines = [
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
        f"Content-Type: {CONTENT_TYPE}",
        f"Content-Length: {len(body)}",
        f"{REQUEST_ID_KEY}: {request_id}",
        "Connection: close",
    ]
    if refusal.retry_after_s:
        lines.append(f"Retry-After: {-int(-refusal.retry_after_s // 1)}")
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    writer.write(b"" if head is not None and head.method == "HEAD" else body)
    with suppress(OSError):
        await writer.drain()
    log = logs.request_log()
    if log is not None:
        log(f"{head.method} {head.path}" if head is not None else "malformed", str(refusal.status), 0.0, request_id)
