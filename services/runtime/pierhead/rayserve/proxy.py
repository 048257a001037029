"""The HTTP server of `serve.run`: routes to applications, with Ray Serve's answers to what no deployment answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

from pierhead.errors import SettingsError
from pierhead.http.asgi_exchange import Message, Receive, Scope, Send
from pierhead.http.asgi_server import UvicornServer
from pierhead.raised import is_answerable
from pierhead.rayserve.config import HTTPOptions
from pierhead.rayserve.responses import (
    REQUEST_ID,
    answer,
    fit_for,
    reply,
    request_id_of,
    request_of,
    serve_request,
    timeout_of,
    words_of,
)
from pierhead.rayserve.running import RunningApplication

_WITHOUT_WATCH: Final = b"x-request-disconnect-disabled"


class RayServeProxy:
    """An ASGI application before the applications of this process."""

    def __init__(self, applications: Mapping[str, RunningApplication], options: HTTPOptions) -> None:
        self._applications = applications
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request or WebSocket."""
        request_id = request_id_of(scope)
        send = fit_for(scope, send)
        stamp = (REQUEST_ID, request_id.encode("latin-1"))

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), stamp]}
            await send(message)

        path = scope["path"].removeprefix(self._options.root_path)
        if scope["type"] == "http" and path in ("/-/healthz", "/-/routes"):
            await reply(stamped, *self._about(path))
        elif (application := self._match(path)) is None:
            await reply(
                stamped, f"Path '{scope['path']}' not found. Ping http://.../-/routes for available routes.", 404
            )
        else:
            await self._serve(application, request_id, scope, receive, stamped)

    def _about(self, path: str) -> tuple[Any, int]:
        """Health, or the routes, and the status."""
        if not self._applications:
            return "Route table is not populated yet.", 503
        routes = {each.route_prefix: each.name for each in self._applications.values() if each.route_prefix}
        return "success" if path == "/-/healthz" else routes, 200

    def _match(self, path: str) -> RunningApplication | None:
        """The application with the longest prefix of the path."""

        def takes(prefix: str) -> bool:
            return prefix in ("/", path) or path.startswith(f"{prefix}/")

        found = [each for each in self._applications.values() if each.route_prefix and takes(each.route_prefix)]
        return max(found, key=lambda each: len(each.route_prefix or ""), default=None)

    async def _serve(
        self, application: RunningApplication, request_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        prefix = application.route_prefix or "/"
        scope["root_path"] = self._options.root_path + ("" if prefix == "/" else prefix)
        request = request_of(scope, request_id, route=prefix, app_name=application.name)

        async def serve(receive: Receive, send: Send) -> None:
            async with AsyncExitStack() as place:
                try:
                    deployed = await place.enter_async_context(application.at_a_replica(request))
                except BaseException as error:
                    if not is_answerable(error):
                        raise
                    await reply(send, *words_of(error))
                else:
                    await serve_request(deployed, request, scope, receive, send)

        headers = dict(scope["headers"])
        timeout_s = timeout_of(headers, self._options.request_timeout_s)
        listens = scope["type"] == "http" and headers.get(_WITHOUT_WATCH) != b"?1"
        await answer(request_id, receive, send, serve, timeout_s, listens=listens)  # uvicorn answers what it raises


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
