"""A middleware that puts any ASGI 3 application (FastAPI, Starlette, ...) behind the edge, under any server.

The application behaves as before, its own error responses included. It gains a request id on every response, a
deadline, admission, cancellation when the client leaves, metrics by route, a drain, and the usual JSON errors for
exceptions that it does not handle.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeGuard

from pierhead.deadlines import Deadlines
from pierhead.edge.edge import UNMATCHED, Edge
from pierhead.errors import ReplicaDied
from pierhead.http.asgi_errors import EDGE_KEY, answer_errors
from pierhead.http.asgi_exchange import Exchange, HttpExchange, Receive, Scope, Send, SocketExchange
from pierhead.http.constants import CLIENT_LEFT
from pierhead.http.visit import Visit
from pierhead.raised import end_process, is_answerable
from pierhead.request import MODEL_KEY, REQUEST_ID_KEY, SESSION_KEY, START_KEY, TIMEOUT_KEY, TRACEPARENT_KEY

logger = logging.getLogger("pierhead")

AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"))

PREFIX_KEY = "x-forwarded-prefix"
"""The route that HAProxy took off the path (x-serve.strip_prefix). It lets no client's own one through."""

FOR_KEY = "x-forwarded-for"
"""HAProxy adds its client's address at the end. It is the client where the connection, to a Unix socket, tells none."""

_KEYS = (REQUEST_ID_KEY, TIMEOUT_KEY, TRACEPARENT_KEY, START_KEY, SESSION_KEY, MODEL_KEY, PREFIX_KEY, FOR_KEY)
_READ = {key.encode(): key for key in _KEYS}


class asgi:  # noqa: N801 - reads as the function it is to its callers
    """`serve(asgi(app))`: marks `app` as an ASGI 3 application. Needed where `serve` cannot detect it.

    A FastAPI or Starlette application then answers the runtime's errors also where it runs without a replica, as under
    httpx's ASGITransport: a BadRequest is a 400.
    """

    def __init__(self, app: AsgiApp) -> None:
        self.app = app
        answer_errors(app)


def is_asgi(part: object) -> TypeGuard[AsgiApp]:
    """Whether an object looks like an ASGI 3 application: `async def (scope, receive, send)`, or an object of such a
    class."""
    if not callable(part) or isinstance(part, type):
        return False
    call = part if inspect.isroutine(part) else type(part).__call__
    if not inspect.iscoroutinefunction(call):
        return False
    try:
        inspect.signature(part).bind(None, None, None)
    except TypeError:
        return False
    return True


class AsgiEdge:
    """The middleware around one application."""

    def __init__(self, app: AsgiApp, edge: Edge) -> None:
        self._app = app
        self._edge = edge
        self._deadlines = Deadlines.current()
        self._sockets: set[SocketExchange] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, one WebSocket, or the application's start and stop."""
        if scope["type"] == "http":
            await self._visit(scope, HttpExchange(scope, receive, send, self._edge))
        elif scope["type"] == "websocket":
            socket = SocketExchange(scope, receive, send, self._edge)
            self._sockets.add(socket)
            try:
                await self._visit(scope, socket)
            finally:
                self._sockets.discard(socket)
        else:
            await self._app(scope, receive, send)

    def drain(self) -> None:
        """Close every WebSocket: unlike requests they do not end by themselves. Clients reconnect to other replicas."""
        for socket in self._sockets:
            task = asyncio.ensure_future(socket.restart())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _visit(self, scope: Scope, exchange: Exchange) -> None:
        headers = {_READ[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _READ}
        scope[EDGE_KEY] = True
        if scope.get("client") is None and FOR_KEY in headers:
            scope["client"] = (headers[FOR_KEY].rpartition(",")[2].strip(), 0)
        if PREFIX_KEY in headers:
            _mount(scope, headers[PREFIX_KEY])
        visit = exchange.visit = Visit(headers.get, self._edge)
        code = CLIENT_LEFT
        try:
            try:
                exchange.admit()
                visit.begin(headers.get, self._deadlines)
                exchange.begin(self._deadlines)
                await self._app(scope, exchange.receive, exchange.send)
                await exchange.finish()
            except BaseException as error:
                await self._failed(scope, exchange, visit, error)
            code = exchange.code
        finally:
            exchange.end()
            visit.end(label_of(scope, code), code)

    async def _failed(self, scope: Scope, exchange: Exchange, visit: Visit, error: BaseException) -> None:
        if exchange.gone and (exchange.is_own(error) or is_answerable(error)):
            logger.debug("an application ended as its client had left", exc_info=error)
            return
        label = label_of(scope, exchange.status)
        known = visit.known(error, label)
        if known is None:
            end_process(error)
            if not self._edge.admission.draining:
                raise error
            # The drain is over and the server cancels the remaining requests. How much was done is unknown.
            known = ReplicaDied(f"{label} was not done when the replica's time to drain was over")
        if not await exchange.send_error(known, visit.request_id):
            # Part of the response was sent; the server closes the connection, as the response is incomplete.
            visit.outcome = str(known.http_status)
            logger.error("%s failed after its response had begun: %s", label, known.message)


def _mount(scope: Scope, prefix: str) -> None:
    """Tell the application where it is mounted: as in ASGI and WSGI, `path` begins with `root_path`.

    So FastAPI's /docs finds its schema, and links and redirects lead back here.
    """
    scope["root_path"] = prefix
    scope["path"] = prefix + scope["path"]
    if scope.get("raw_path") is not None:
        scope["raw_path"] = prefix.encode("latin-1") + scope["raw_path"]


def label_of(scope: Scope, code: str) -> str:
    """The declared route, if the application sets it as Starlette does; never a path."""
    method = scope.get("method", "GET")
    if method not in METHODS:
        method = "OTHER"
    path = getattr(scope.get("route"), "path", None)
    if isinstance(path, str):
        return f"{method} {path}"
    return UNMATCHED if code == "404" else f"{method} *"
