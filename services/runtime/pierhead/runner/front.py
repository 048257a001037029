"""The front of an application without HAProxy: finds the service of each request by its route, and passes bytes on.

    client -> Front -> queue of the service that has the longest matching route -> listener of a replica with room

Each request has a connection to its service of its own, and is the last one on its client's: so the next one is routed
again, and bodies, streams and WebSockets need no code here.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

from pierhead.calls.lease import CallPlace
from pierhead.calls.pool import Pool
from pierhead.calls.replica import Replica
from pierhead.calls.turn import LineFull, lease_in_turn
from pierhead.edge import logs
from pierhead.errors import PierheadError
from pierhead.http.answers import CONTENT_TYPE
from pierhead.pipes import join
from pierhead.policies.router import PolicyRouter, Ranks
from pierhead.request import MODEL_KEY, REQUEST_ID_KEY, SESSION_KEY, START_KEY, accept_id
from pierhead.runner.runner import FrontRoute
from pierhead.serve_block import DEFAULT_POLICY

MOST_HEAD_BYTES: Final = 32 * 1024
HEAD_S: Final = 30.0
"""How long a client may take to send the head of a request, as for HAProxy."""
CONNECT_S: Final = 5.0
TRIES: Final = 3
"""How many replicas a request may meet that do not listen any more."""

_OURS = frozenset(("connection", "keep-alive", "proxy-connection", "x-forwarded-prefix", START_KEY))
"""Headers of clients that are not passed on."""


class RefusedRequest(Exception):
    """A request that no service gets."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float = 0, **more: object) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.more = more


class RequestHead:
    """The head of a request. Raises RefusedRequest for bytes that are none."""

    def __init__(self, head: bytes) -> None:
        first, *fields = head.decode("latin-1").split("\r\n")[:-2]
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or any(":" not in each for each in fields):
            raise RefusedRequest(
                400, "bad_request", "This is not a valid HTTP request: check its request line and headers."
            )
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


class FrontRequest:
    """A request as a policy sees it; a RankedCall."""

    request = None
    ranks: Ranks[Replica] | None = None

    def __init__(self, path: str, session_id: str | None, model_id: str | None) -> None:
        self.path = path
        self.session_id = session_id
        self.model_id = model_id


class _ListeningReplica:
    """The way to a replica that listens for HTTP; a Connection, of which each request has its own."""

    ready = True

    def check(self) -> None:
        """Does nothing: a request that cannot connect tries another replica."""

    async def close(self) -> None:
        """Does nothing: requests end by themselves."""


class _ServiceQueue:
    """The requests of one service: those that its replicas have, and those that wait."""

    def __init__(self, route: FrontRoute) -> None:
        self.route = route
        self.router = PolicyRouter(DEFAULT_POLICY, random.Random(), follows=True)  # noqa: S311 - spreads load
        connect: Any = lambda address, changed: _ListeningReplica()  # noqa: E731
        self.pool = Pool(route.service, connect)
        self.pool.watch(self.router)
        self.pool.update(route.listing)

    def update(self, route: FrontRoute) -> None:
        self.route = route
        self.pool.update(route.listing)

    async def connected(self, request: FrontRequest) -> tuple[CallPlace, asyncio.StreamReader, asyncio.StreamWriter]:
        """A place at a replica, and a connection to it. Raises RefusedRequest."""
        tried: list[Replica] = []
        while True:
            lease = await self._lease(request, tried)
            host, _, port = lease.replica.address.rpartition(":")
            try:
                async with asyncio.timeout(CONNECT_S):
                    return (lease, *await asyncio.open_connection(host, int(port)))
            except (OSError, TimeoutError):
                self.pool.failed(lease, time.monotonic())
                tried.append(lease.replica)
                lease.end()
                if len(tried) == TRIES:
                    raise self._refusal("overloaded", "No replica of {} could be connected to.") from None
            except BaseException:
                lease.end()
                raise

    async def _lease(self, request: FrontRequest, tried: Sequence[Replica]) -> CallPlace:
        route = self.route
        most = route.listing.max_queued_requests
        try:
            return await lease_in_turn(
                self.pool,
                self.router,
                request,
                most_waiting=-1 if most is None else most,
                wait_s=route.timeout_s,
                tried=tried,
            )
        except LineFull:
            words = "Every replica of {} is busy and its queue is full. Nothing was done; try again later."
            raise self._refusal("queue_full", words) from None
        except TimeoutError:
            words = "No replica of {} took the request: all are busy. Nothing was done; try again."
            raise self._refusal("overloaded", words) from None
        except PierheadError as error:
            raise RefusedRequest(error.http_status, error.kind, error.message) from None

    def _refusal(self, code: str, words: str) -> RefusedRequest:
        route = self.route
        return RefusedRequest(route.refusal_status, code, words.format(route.service), route.retry_after_s)


class Front:
    """Listens for HTTP, and for gRPC, which it passes on unread. Owned by one event loop."""

    def __init__(self) -> None:
        self._routes: Sequence[FrontRoute] | None = None
        self._why = ""
        self._queues: dict[str, _ServiceQueue] = {}
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
        for route in routes:
            if route.service in self._queues:
                self._queues[route.service].update(route)
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
        for queue in self._queues.values():
            await queue.pool.close()

    def waiting(self, service: str) -> int:
        """Requests that wait for a replica of a service with room."""
        return self._queues[service].pool.waiting if service in self._queues else 0

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
            async with asyncio.timeout(CONNECT_S):
                inner = await asyncio.open_connection("127.0.0.1", self._grpc_port)
            await join(reader, writer, *inner)

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head: RequestHead | None = None
        try:
            async with asyncio.timeout(HEAD_S):
                try:
                    raw = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    raw = b"\r\n\r\n"
            head = RequestHead(raw)
            await self._known.wait()
            route = self._route_of(head.path)
            client = str(writer.get_extra_info("peername")[0])
            request = FrontRequest(head.path, head.header(SESSION_KEY), head.header(MODEL_KEY))
            lease, inner_reader, inner_writer = await self._queue_of(route).connected(request)
            try:
                inner_writer.write(head.to(route, client))
                await join(reader, writer, inner_reader, inner_writer)
            finally:
                lease.end()
        except RefusedRequest as refusal:
            await _answer(writer, refusal, head)

    def _queue_of(self, route: FrontRoute) -> _ServiceQueue:
        found = self._queues.get(route.service)
        if found is None:
            found = self._queues[route.service] = _ServiceQueue(route)
        return found

    def _route_of(self, path: str) -> FrontRoute:
        if self._routes is None:
            raise RefusedRequest(503, "not_loaded", self._why, 1)
        for route in self._routes:
            if route.takes(path):
                return route
        routes = {route.path: route.service for route in sorted(self._routes, key=lambda each: each.path)}
        there_are = f"The routes are {', '.join(routes)}." if routes else "There are no routes yet."
        raise RefusedRequest(404, "route_not_found", f'No route takes "{path}". {there_are}', routes=routes)


_Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def _answer(writer: asyncio.StreamWriter, refusal: RefusedRequest, head: RequestHead | None) -> None:
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
