"""The admin port of a replica: /livez, /readyz, /metrics, /traces, /contract, PUT /user-config and PUT /sleep, for the
controller and Prometheus, not for clients.

It has its own small HTTP server, as it serves only five GET requests without bodies and PUTs with short ones. The
HTTP library would take a quarter of the memory of a replica that has no other use for it (14 MB of 57, measured).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Literal, NamedTuple

from pierhead.admin_token import shows
from pierhead.edge.unix_sockets import bound
from pierhead.json_data import not_json
from pierhead.metrics import CONTENT_TYPE
from pierhead.replica.sleep import SleepState
from pierhead.replica.user_config import ConfigReport
from pierhead.settings import MAX_USER_CONFIG_BYTES

logger = logging.getLogger("pierhead")

JSON_TYPE = "application/json; charset=utf-8"

State = Literal["starting", "ready", "draining"]

MAX_HEAD_BYTES = 16 * 1024
"""Longest head of a request: HAProxy sends no longer one."""

MAX_CONNECTIONS = 1024
"""Most connections: far more than a controller, a load balancer and a few Prometheus servers open."""

IDLE_S = 75.0
"""Keep-alive time of a connection: longer than the time between two scrapes of Prometheus."""

SLOW_S = 10.0
"""How long a new connection may take to send its request, and a client to read its answer."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """The content of /readyz. A ready replica has an empty `detail`."""

    state: State
    ongoing: int
    """Requests in flight here that are a use of the service."""
    queued: int
    """Calls of this replica that wait for another service's replica."""
    detail: str = ""
    """Why it is not ready."""
    waiting: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """`queued` by the called service."""
    answered: int = 0
    """Requests answered since the start, without refused ones; see `tally`."""
    errors: int = 0
    """How many of the answers were errors of this service's own."""
    progress: int = 0
    """A number that changes whenever work has advanced: a request was answered in time, a message of a stream was sent,
    a step of the start was reported."""
    user_config: ConfigReport | None = None
    """The user_config that it has; None before it can receive one."""
    stats: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The numbers that it publishes for callers' policies; see `routing_stats`."""
    stats_version: int = 0
    """Grows with each change of `stats`; 0 = nothing is published."""
    broken: bool = False
    """It is not ready, and a check reports that it will not recover by itself."""
    stage: str = ""
    """What its start is doing, without the progress; "" after the start, or if it was not reported."""
    lasting: int = 0
    """How many of the requests in flight only a drain ends: WebSockets, endless streams."""
    unreached: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """By called service, the replicas that it lists and to which no call of this replica goes, and why."""
    used: int = 0
    """Requests that have ended since the start, refused ones included, without those that are no use of the service."""
    sleep: SleepState | None = None
    """Whether it sleeps; None where no part of it can be asked to."""


class Page(NamedTuple):
    """One answer."""

    status: int
    content_type: str
    body: bytes
    allow: str = "GET, HEAD"
    """The methods that the path accepts, for a 405."""


Pages = Mapping[tuple[str, str], Callable[[bytes], Page]]
"""GET or PUT, and the path -> the function that makes the answer, of the body of a PUT."""


def admin_taker(
    member: str, offer: Callable[[str], None], report: Callable[[], ConfigReport | SleepState | None]
) -> Pages:
    """The admin port's PUT path of a member of /readyz; `offer` raises ValueError for an invalid body."""

    def take(body: bytes) -> Page:
        try:
            offer(body.decode())
        except ValueError as error:  # UnicodeDecodeError is one
            return _json(400, {"error": f"{member}: {error}"})
        reported = report()
        return _json(200, {member: reported and asdict(reported)})

    return {("PUT", f"/{member.replace('_', '-')}"): take}


def admin_pages(
    read: Callable[[], Readiness],
    expose: Callable[[], bytes],
    contract: bytes = b"",
    traces: Callable[[], bytes] | None = None,
) -> Pages:
    """The admin port's GET paths; `expose` returns the text of /metrics, `traces` the content of /traces.

    `contract`: a `pierhead.contract.v1.Application`, serialized; b"" = it has none, and no path for it.
    """

    def readyz(_: bytes) -> Page:
        readiness = read()
        return _json(200 if readiness.state == "ready" else 503, asdict(readiness))

    pages: dict[tuple[str, str], Callable[[bytes], Page]] = {
        ("GET", "/livez"): lambda _: _json(200, {"alive": True}),
        ("GET", "/readyz"): readyz,
        ("GET", "/metrics"): lambda _: Page(200, CONTENT_TYPE, expose()),
    }
    if traces is not None:
        pages["GET", "/traces"] = lambda _: Page(200, JSON_TYPE, traces())
    if contract:
        pages["GET", "/contract"] = lambda _: Page(200, "application/x-protobuf", contract)
    return pages


class AdminServer:
    """Serves GET and HEAD requests for a few pages, and PUT requests, over HTTP/1.1 with keep-alive."""

    def __init__(self, pages: Pages, token: str = "") -> None:
        """`token`: what a PUT has to show as `Authorization: Bearer`; "" = nothing."""
        self._token = token
        self._pages = pages
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError if it cannot be opened."""
        server = await asyncio.start_server(self._connected, host, port, limit=MAX_HEAD_BYTES, backlog=128)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def listen_at(self, path: str) -> None:
        """Listen at a Unix socket, too. Raises SettingsError if it cannot be opened."""
        self._servers.append(
            await asyncio.start_unix_server(self._connected, sock=bound(path), limit=MAX_HEAD_BYTES, backlog=128)
        )

    async def close(self) -> None:
        """Close the port and every connection."""
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has left, or the server closes the connection
        finally:
            self._connections.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        goes_on, patience_s = True, SLOW_S
        while goes_on:
            async with asyncio.timeout(patience_s):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    head = b""
            request, body = read_head(head), b""
            if ("PUT", request.path) in self._pages and 0 < request.length <= MAX_USER_CONFIG_BYTES:
                async with asyncio.timeout(SLOW_S):
                    body = await reader.readexactly(request.length)
            goes_on, patience_s = request.goes_on, IDLE_S
            writer.write(_response(self._answer(request, body), request))
            async with asyncio.timeout(SLOW_S):
                await writer.drain()

    def _answer(self, request: AdminRequest, body: bytes) -> Page:
        if not request.method:
            return _json(400, {"error": "this is not an HTTP request that the admin port understands"})
        method, path = "GET" if request.method == "HEAD" else request.method, request.path
        make = self._pages.get((method, path))
        if make is None:
            for takes, known in self._pages:
                if known == path:
                    allow = "PUT" if takes == "PUT" else "GET, HEAD"
                    return _json(405, {"error": f"{path} takes {takes}"})._replace(allow=allow)
            return _json(404, {"error": f"the admin port answers {', '.join(known for _, known in self._pages)}"})
        if method == "PUT" and not shows(request.authorization, self._token):
            why = "this is for the controller alone, by a token; if its state was lost, restart the service"
            return _json(403, {"error": why})
        if method == "PUT" and not body:
            return _json(
                413, {"error": f"{path}: expected a body of 1 to {MAX_USER_CONFIG_BYTES} bytes and its length"}
            )
        if method == "PUT" and (problem := not_json(request.content_type)):
            return _json(400, {"error": problem})
        try:
            return make(body)
        except Exception:
            logger.exception("internal: %s failed", path)
            return _json(500, {"error": f"{path} failed; the replica's log says why"})


class AdminRequest(NamedTuple):
    """The parts of a request that matter here."""

    method: str
    """"" = malformed."""
    path: str = ""
    goes_on: bool = False
    """Whether another request may follow on the connection."""
    length: int = 0
    """Bytes of the body of a PUT; -1 if the head does not state it: the connection is then closed after the answer."""
    content_type: str = ""
    authorization: str = ""
    """In lower case."""


def read_head(head: bytes) -> AdminRequest:
    """Read a request's head, up to its empty line (RFC 9112). Pure."""
    line, *fields = head.decode("latin-1").split("\r\n")
    words = line.split(" ")
    if len(words) != 3 or not all(words) or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        return AdminRequest("")
    method, target, version = words
    headers: dict[str, str] = {}
    for field in fields[:-2]:
        name, colon, value = field.partition(":")
        if not colon or not name or name != name.strip():
            return AdminRequest("")
        headers[name.lower()] = value.strip().lower()
    length = _length(headers)
    wishes = headers.get("connection", "keep-alive" if version == "HTTP/1.1" else "close")
    # An unwanted body is not read, so the next request on the connection could not be found.
    goes_on = length == 0 and "keep-alive" in wishes
    path, taken = target.partition("?")[0], length if method == "PUT" else 0
    shown = headers.get("content-type", ""), headers.get("authorization", "")
    return AdminRequest(method, path, goes_on, taken, *shown)


def _length(headers: Mapping[str, str]) -> int:
    """Bytes of a request's body; -1 if the head does not state it."""
    text = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (text.isascii() and text.isdigit() and len(text) < 10):
        return -1
    return int(text)


def _response(page: Page, request: AdminRequest) -> bytes:
    reason = HTTPStatus(page.status).phrase
    head = (
        f"HTTP/1.1 {page.status} {reason}\r\nContent-Type: {page.content_type}\r\nContent-Length: {len(page.body)}\r\n"
    )
    if page.status == 405:
        head += f"Allow: {page.allow}\r\n"
    head += f"Connection: {'keep-alive' if request.goes_on else 'close'}\r\n\r\n"
    return head.encode() + (b"" if request.method == "HEAD" else page.body)


def _json(status: int, body: Mapping[str, object]) -> Page:
    return Page(status, JSON_TYPE, json.dumps(body).encode())
