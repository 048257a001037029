"""The admin port of a replica: /livez, /readyz, /metrics. The controller and Prometheus ask there; clients do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from aiohttp import web

from pierhead.metrics import CONTENT_TYPE, RuntimeMetrics

State = Literal["starting", "ready", "draining"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """What /readyz says. Ready with a non-empty `detail` never happens."""

    state: State
    ongoing: int
    """Requests this replica works on."""
    queued: int
    """Calls of this replica that wait for another service's replica."""
    detail: str = ""
    """Why it is not ready."""


def admin_app(read: Callable[[], Readiness], metrics: RuntimeMetrics) -> web.Application:
    """The application behind the admin port."""

    async def livez(_: web.Request) -> web.Response:
        return web.json_response({"alive": True})

    async def readyz(_: web.Request) -> web.Response:
        readiness = read()
        return web.json_response(asdict(readiness), status=200 if readiness.state == "ready" else 503)

    async def expose(_: web.Request) -> web.Response:
        return web.Response(body=metrics.expose(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", expose)])
    return app
