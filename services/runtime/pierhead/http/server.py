"""The HTTP side of a replica: an aiohttp application behind the edge.

The edge is not a middleware: it stands around the whole application, its routing included, where it costs one frame
for each request and nothing is built anew.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, cast

from aiohttp import web

from pierhead.edge.edge import Edge
from pierhead.errors import cannot_listen
from pierhead.http.asgi_edge import asgi, is_asgi
from pierhead.http.asgi_server import AsgiListener
from pierhead.http.connection import Connection
from pierhead.http.constants import BACKLOG, KEEPALIVE_S
from pierhead.http.gate import Gate, Request

MAX_HEAD_BYTES = 32 * 1024
"""Of a request line or a header. HAProxy takes heads of 16 KiB at most and answers longer ones itself."""


class HttpListener(Protocol):
    """What serves HTTP in a replica."""

    async def start(self, edge: Edge, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Start the application and listen; returns the port. Raises SettingsError when it cannot be had."""
        ...

    def moved(self) -> int:
        """Another number whenever a response that is under way has moved and `Edge.moved` does not tell."""
        ...

    def drain(self) -> None:
        """Tell what would not end by itself to end. The admission is draining already."""
        ...

    async def stop(self) -> None:
        """Close the port and every connection, end the application."""
        ...


def listener_for(part: object) -> HttpListener | None:
    """What serves a part of `serve(...)` over HTTP; None when it is no HTTP application."""
    if isinstance(part, web.Application):
        return AiohttpListener(part)
    if isinstance(part, asgi):
        return AsgiListener(part.app)
    if is_asgi(part):
        return AsgiListener(part)
    return None


class AiohttpListener:
    """Serves an `aiohttp.web.Application`."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._runner: _Runner | None = None

    async def start(self, edge: Edge, host: str, port: int, *, reuse_port: bool = False) -> int:
        """See HttpListener."""
        self._runner = runner = _Runner(self._app, edge)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG, reuse_port=reuse_port or None).start()
        except OSError as error:
            raise cannot_listen("PIERHEAD_PORT", host, port, error) from error
        return int(runner.addresses[0][1])

    def moved(self) -> int:
        """See HttpListener."""
        return self._runner.gate.moved() if self._runner is not None else 0

    def drain(self) -> None:
        """Close the WebSockets; requests end by themselves."""
        if self._runner is not None:
            self._runner.gate.drain()

    async def stop(self) -> None:
        """See HttpListener."""
        if self._runner is not None:
            await self._runner.cleanup()
            await self._runner.gate.closed()


class _Runner(web.AppRunner):
    """Runs an application whose requests pass a gate and whose connections are ours."""

    __slots__ = ("gate",)

    def __init__(self, app: web.Application, edge: Edge) -> None:
        self.gate = Gate(app, edge)
        super().__init__(
            app,
            handle_signals=False,
            access_log=None,  # the edge writes a line for each request
            keepalive_timeout=KEEPALIVE_S,
            handler_cancellation=True,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            shutdown_timeout=0.1,  # the drain is over by then
        )

    async def _make_server(self) -> web.Server:
        inner = await super()._make_server()
        self.gate.enter_by(inner.request_handler)
        return _Server(self.gate, inner)


class _Server(web.Server):
    """aiohttp's own, with a gate before its handler, and with connections that answer malformed requests as we do."""

    def __init__(self, gate: Gate, inner: web.Server) -> None:
        super().__init__(
            gate.handle,
            request_factory=partial(cast("Any", inner.request_factory), _cls=Request),
            handler_cancellation=inner.handler_cancellation,
            **inner._kwargs,
        )
        self._gate = gate

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._gate, loop=self._loop, **self._kwargs)
