"""The HTTP side of a replica: serves an aiohttp or an ASGI application behind the edge."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from pierhead.edge.edge import Edge
from pierhead.edge.unix_sockets import bound
from pierhead.errors import cannot_listen
from pierhead.http.asgi_edge import asgi, is_asgi
from pierhead.http.asgi_server import AsgiListener
from pierhead.http.constants import BACKLOG, RUNNER_OPTIONS
from pierhead.http.gate import Gate
from pierhead.http.known import shortcuts


class HttpListener(Protocol):
    """A server for HTTP in a replica."""

    async def start(self, edge: Edge, host: str, port: int) -> int:
        """Start the application and listen, also at the edge's own socket; returns the port.

        Raises SettingsError if one of them cannot be opened.
        """
        ...

    def moved(self) -> int:
        """A number that changes with the progress of responses that `Edge.moved` does not count."""
        ...

    def drain(self) -> None:
        """End connections that do not end by themselves. The admission is draining already."""
        ...

    async def stop(self) -> None:
        """Close the port and every connection, end the application."""
        ...


def listener_for(part: object) -> HttpListener | None:
    """The HTTP server for a part of `serve(...)`; None if it is no HTTP application."""
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
        self._gate: Gate | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, edge: Edge, host: str, port: int) -> int:
        """See HttpListener."""
        known = shortcuts()
        if known and known.is_untouched():
            runner = known.GateRunner(self._app, edge)
            self._gate, self._runner = runner.gate, runner
        else:
            self._gate = Gate(self._app, edge)
            self._gate.join()
            self._runner = web.AppRunner(self._app, **RUNNER_OPTIONS)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            raise cannot_listen("PIERHEAD_PORT", host, port, error) from error
        port = int(self._runner.addresses[0][1])
        if edge.settings.socket:
            await web.SockSite(self._runner, bound(edge.settings.socket), backlog=BACKLOG).start()
        return port

    def moved(self) -> int:
        """See HttpListener."""
        return self._gate.moved() if self._gate is not None else 0

    def drain(self) -> None:
        """Close the WebSockets; requests end by themselves."""
        if self._gate is not None:
            self._gate.drain()

    async def stop(self) -> None:
        """See HttpListener."""
        if self._runner is not None and self._gate is not None:
            await self._runner.cleanup()
            await self._gate.closed()
