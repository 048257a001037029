"""The gateway's HTTP application: its routes and their handlers."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from pierhead import http_errors
from pierhead.llm.gateway.endpoints import ABSENT, KNOWN, OTHER, POSTS, RESPONSE, STORED, RequestKind
from pierhead.llm.gateway.errors import answer_error, runtime_error_body, unknown_path
from pierhead.llm.gateway.exchange import ClientExchange
from pierhead.llm.gateway.gateway import Gateway
from pierhead.llm.gateway.metrics import GatewayMetrics
from pierhead.llm.gateway.settings import GatewaySettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    settings: GatewaySettings, metrics: GatewayMetrics | None = None, clock: Callable[[], float] = time.monotonic
) -> web.Application:
    """The application. `clock`: seconds."""
    gateway = Gateway(settings, metrics or GatewayMetrics(), clock)
    app = web.Application(client_max_size=settings.max_body_bytes)
    app[http_errors.ERROR_BODY] = runtime_error_body
    for prefix in ("", *gateway.models.paths):
        _add_routes(app.router, gateway, prefix)
    app.cleanup_ctx.append(gateway.live)
    return app


def _add_routes(router: web.UrlDispatcher, gateway: Gateway, prefix: str) -> None:
    """All paths, below the prefix of one model's own."""
    router.add_get(f"{prefix}/health", gateway.health_handler)
    router.add_get(f"{prefix}/ping", gateway.health_handler)
    router.add_post(f"{prefix}/ping", gateway.health_handler)
    router.add_get(f"{prefix}/version", gateway.version_handler)
    router.add_get(f"{prefix}/load", gateway.load_handler)
    router.add_get(f"{prefix}/v1/models", gateway.models_handler)
    router.add_get(f"{prefix}/v1/models/{{id:.+}}", gateway.model_handler)
    for path, endpoint in POSTS.items():
        router.add_post(prefix + path, _handler(gateway, endpoint))
    for folder in ("/v1/", "/"):
        known = "|".join(re.escape(path.removeprefix(folder)) for path in KNOWN if path.startswith(folder))
        router.add_route(hdrs.METH_ANY, f"{prefix}{folder}{{path:(?:{known})}}/", _without_slash)

    async def absent(request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix(prefix)
        if path in POSTS:
            raise web.HTTPMethodNotAllowed(request.method, [hdrs.METH_POST])
        return answer_error(unknown_path(path), {})

    router.add_route(hdrs.METH_ANY, prefix + ABSENT, absent)
    router.add_get(prefix + RESPONSE, _handler(gateway, STORED))
    router.add_post(f"{prefix}{RESPONSE}/cancel", _handler(gateway, STORED))
    router.add_post(f"{prefix}/v1/{{path:.+}}", _handler(gateway, OTHER))
    router.add_route(hdrs.METH_ANY, f"{prefix}/v1/{{path:.+}}", absent)


def _handler(gateway: Gateway, endpoint: RequestKind) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await ClientExchange(gateway, request, endpoint).answer()

    return handle


async def _without_slash(request: web.Request) -> web.StreamResponse:
    """Sends the client to a known path without the slash at its end, as vLLM does."""
    place = request.rel_url.with_path(request.path.rstrip("/"), keep_query=True)
    return web.Response(status=307, headers={hdrs.LOCATION: str(place)})
