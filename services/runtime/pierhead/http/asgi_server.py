"""Serves an ASGI application with uvicorn, inside the replica's own event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from pierhead.edge import unix_sockets
from pierhead.edge.edge import Edge
from pierhead.errors import SettingsError, cannot_listen
from pierhead.http.asgi_edge import AsgiApp, AsgiEdge
from pierhead.http.constants import BACKLOG, KEEPALIVE_S


class UvicornServer:
    """uvicorn in the running event loop."""

    def __init__(self, app: AsgiApp, extra: str, **options: Any) -> None:
        """`options` of uvicorn. Raises SettingsError where it is missing; `extra`: what installs it."""
        try:
            import uvicorn
        except ImportError as error:
            raise SettingsError(
                f"an ASGI application is to be served, and uvicorn is not installed: install pierhead[{extra}]"
            ) from error
        config = uvicorn.Config(
            app,
            loop="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,  # what drains has drained by then
            **options,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._running: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, path: str = "") -> int:
        """Listen, also at the Unix socket `path`; returns the port. Raises OSError or SettingsError where it cannot,
        RuntimeError where the application cannot start.
        """
        listeners = [_bind(host, port)]
        try:
            if path:  # last: it takes the place of another process's, where a port does not
                listeners.append(unix_sockets.bound(path))
            # Not serve(), which takes over the process's signals.
            await self._server.startup(sockets=listeners)
        except (SettingsError, SystemExit) as error:
            for each in listeners:
                each.close()
            if isinstance(error, SettingsError):
                raise
            raise RuntimeError("the application's lifespan has failed at its start; see the log") from error
        self._running = asyncio.create_task(self._server.main_loop(), name="uvicorn")
        return int(listeners[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._running is not None:
            self._server.should_exit = True
            await self._running
            await self._server.shutdown()


class AsgiListener:
    """An HttpListener for an ASGI 3 application."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._edge: AsgiEdge | None = None
        self._server: UvicornServer | None = None

    async def start(self, edge: Edge, host: str, port: int) -> int:
        """See HttpListener."""
        # It logs every start, stop and WebSocket, as the runtime does.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._edge = AsgiEdge(self._app, edge)
        self._server = UvicornServer(
            self._edge,
            "asgi",
            http=_protocol(),
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEPALIVE_S,
        )
        try:
            return await self._server.start(host, port, edge.settings.socket)
        except OSError as error:
            raise cannot_listen("PIERHEAD_PORT", host, port, error) from error

    def moved(self) -> int:
        """See HttpListener: the edge around the application counts."""
        return 0

    def drain(self) -> None:
        """Close the WebSockets; requests end without help."""
        if self._edge is not None:
            self._edge.drain()

    async def stop(self) -> None:
        """See HttpListener."""
        if self._server is not None:
            await self._server.stop()


class _ToTheEnd(int):
    """The length of a body that the connection's end tells: however much is taken off it, more may come."""

    def __lt__(self, _: int) -> bool:
        return False

    def __sub__(self, _: int) -> _ToTheEnd:
        return self


def _protocol() -> Any:
    """uvicorn's fast protocol, which would send chunks to clients of HTTP/1.0, too; else the name of its other one."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class Protocol(HttpToolsProtocol):
        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            if self.cycle is not None and self.scope["http_version"] == "1.0":
                self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _ToTheEnd()

    return Protocol


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises OSError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
