"""The HTTP server of `serve.run`: routes to applications, with Ray Serve's answers to what no deployment answers."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

from pierhead.errors import SettingsError
from pierhead.http.asgi_server import UvicornServer
from pierhead.raised import is_answerable
from pierhead.rayserve.config import HTTPOptions
from pierhead.rayserve.responses import (
    REQUEST_ID,
    Message,
    Receive,
    Scope,
    Send,
    late,
    messages_of,
    request_of,
    serve_request,
    timeout_of,
    words_of,
)
from pierhead.rayserve.running import RunningApplication

logger = logging.getLogger("ray.serve")

_MOST_MESSAGES: Final = 16
"""Messages of one request that wait for the application. uvicorn reads no further until one is taken."""

_WITHOUT_WATCH: Final = b"x-request-disconnect-disabled"


class RayServeProxy:
    """An ASGI application before the applications of this process."""

    def __init__(self, applications: Mapping[str, RunningApplication], options: HTTPOptions) -> None:
        self._applications = applications
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request or WebSocket."""
        found = next((value for key, value in scope["headers"] if key == REQUEST_ID), None)
        request_id = found or str(uuid.uuid4()).encode()
        if found is None:
            scope["headers"] = [*scope["headers"], (REQUEST_ID, request_id)]

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID, request_id)]}
            await send(message)

        path = scope["path"].removeprefix(self._options.root_path)
        if scope["type"] == "http" and path in ("/-/healthz", "/-/routes"):
            await _send_all(self._about(path), stamped)
            return
        application = self._match(path)
        if application is None:
            text = f"Path '{scope['path']}' not found. Ping http://.../-/routes for available routes."
            await _send_all(messages_of(text, 404), stamped)
            return
        await self._serve(application, request_id.decode("latin-1"), scope, receive, stamped)

    def _about(self, path: str) -> list[dict[str, Any]]:
        """Health, or the routes."""
        routes = {each.route_prefix: each.name for each in self._applications.values() if each.route_prefix}
        if not self._applications:
            return messages_of("Route table is not populated yet.", 503)
        return messages_of("success" if path == "/-/healthz" else routes)

    def _match(self, path: str) -> RunningApplication | None:
        """The application with the longest prefix of the path."""
        best: RunningApplication | None = None
        for each in self._applications.values():
            prefix = each.route_prefix
            if prefix is None or not (prefix == "/" or path == prefix or path.startswith(f"{prefix}/")):
                continue
            if best is None or len(prefix) > len(best.route_prefix or ""):
                best = each
        return best

    async def _serve(
        self, application: RunningApplication, request_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        prefix = application.route_prefix or "/"
        scope["root_path"] = self._options.root_path + ("" if prefix == "/" else prefix)
        client = _Client(receive, send)
        work = asyncio.create_task(self._work(application, prefix, request_id, scope, client))
        headers = dict(scope["headers"])
        timeout_s = timeout_of(headers, self._options.request_timeout_s)
        waits: set[asyncio.Future[Any]] = {work}
        if headers.get(_WITHOUT_WATCH) != b"?1":
            waits.add(client.left)
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                self._report(work, request_id)
                return
            if client.left.done():
                logger.info("Client for request %s disconnected, cancelling request.", request_id)
                return
            if not client.started:
                await _send_all(messages_of(late(request_id, timeout_s), 408), send)
        finally:
            if not work.done():
                work.cancel()
                client.started = True  # nothing more is sent
                client.closed = True
            client.close()

    async def _work(
        self, application: RunningApplication, prefix: str, request_id: str, scope: Scope, client: _Client
    ) -> None:
        request = request_of(scope, request_id, route=prefix, app_name=application.name)
        async with AsyncExitStack() as place:
            try:
                deployed = await place.enter_async_context(application.at_a_replica(request))
            except BaseException as error:
                if not is_answerable(error):
                    raise
                status, text, headers = words_of(error)
                await _send_all(messages_of(text, status, headers), client.send)
                return
            await serve_request(deployed, request, scope, client.receive, client.send)

    @staticmethod
    def _report(work: asyncio.Task[None], request_id: str) -> None:
        error = None if work.cancelled() else work.exception()
        if error is not None:
            logger.warning("Request %s failed", request_id, exc_info=error)


class _Client:
    """The two callables for the application; `left` is done when the client has gone before its answer."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started = False
        self.closed = False
        self._send = send
        self._watched = True
        self._left_bytes = -1
        """Of the body, where its length is known."""
        self._messages: asyncio.Queue[Message] = asyncio.Queue(_MOST_MESSAGES)
        self._gone: Message | None = None
        self._reading = asyncio.create_task(self._read(receive))

    async def _read(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] in ("http.disconnect", "websocket.disconnect"):
                self._gone = message
                if self._watched and not self.left.done():
                    self.left.set_result(None)
            await self._messages.put(message)
            if self._gone is not None:
                return

    async def receive(self) -> Message:
        if self._gone is not None and self._messages.empty():
            return self._gone
        return await self._messages.get()

    async def send(self, message: Message) -> None:
        if self.closed:
            return
        kind = message["type"]
        self.started = True
        if kind == "http.response.start":
            length = dict(message["headers"]).get(b"content-length")
            self._left_bytes = -1 if length is None else int(length)
        elif kind == "http.response.body":
            self._left_bytes -= len(message.get("body", b""))
            # A client may leave once it has all bytes, while the application has still to say that there are no more.
            self._watched = self._watched and message.get("more_body", False) and self._left_bytes != 0
        else:
            self._watched = False
        await self._send(message)

    def close(self) -> None:
        self._reading.cancel()
        if not self.left.done():
            self.left.cancel()


async def _send_all(messages: list[dict[str, Any]], send: Send) -> None:
    for message in messages:
        await send(message)


async def listen(proxy: RayServeProxy, options: HTTPOptions) -> tuple[UvicornServer, int]:
    """Listen for HTTP; returns the server and its port. Raises SettingsError where uvicorn is missing, or the port is
    taken.
    """
    app: Any = proxy
    for middleware in options.middlewares:
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    server = UvicornServer(
        app,
        "rayserve",
        root_path=options.root_path,
        lifespan="off",
        timeout_keep_alive=options.keep_alive_timeout_s,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile_password=options.ssl_keyfile_password,
        ssl_ca_certs=options.ssl_ca_certs,
    )
    host = options.host or "127.0.0.1"
    try:
        return server, await server.start(host, options.port)
    except OSError as error:
        raise SettingsError(f"Failed to bind to address '{host}:{options.port}': {error}") from error
