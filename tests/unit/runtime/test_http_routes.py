"""Behind the gate, requests get to the handlers that they get to with an unknown aiohttp."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web
from pierhead.replica.server import ReplicaServer
from yarl import URL

from tests.unit.runtime.conftest import make_unknown
from tests.unit.runtime.harness import Cluster


async def told(request: web.Request) -> web.Response:
    """What a handler can see of its route."""
    match = request.match_info
    resource = match.route.resource
    return web.json_response(
        {
            "variables": dict(match),
            "route": resource.canonical if resource is not None else None,
            "app": match.current_app is request.app,
            "apps": len(match.apps),
            "query": request.query.get("q"),
        }
    )


def plain() -> web.Application:
    app = web.Application()
    app.add_routes([web.get("/here", told), web.post("/here", told), web.get("/{name}", told), web.get("/a b", told)])
    return app


async def ask(client: ClientSession, server: ReplicaServer, target: str, method: str = "GET", **options: Any) -> Any:
    url = URL(f"http://127.0.0.1:{server.http_port}{target}", encoded=True)
    async with client.request(method, url, **options) as response:
        return response.status, response.headers.get("x-marked"), await response.json(content_type=None)


def nested() -> web.Application:
    app = web.Application()
    app.add_subapp("/inner", plain())
    app.router.add_get("/here", told)
    return app


def with_middleware() -> web.Application:
    @web.middleware
    async def mark(request: web.Request, handler: Any) -> Any:
        response = await handler(request)
        response.headers["x-marked"] = "1"
        return response

    app = web.Application(middlewares=[mark])
    app.router.add_get("/here", told)
    return app


def with_a_signal() -> web.Application:
    async def mark(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-marked"] = "1"

    inner, app = plain(), web.Application()
    inner.on_response_prepare.append(mark)
    app.add_subapp("/inner", inner)
    return app


@pytest.mark.parametrize("make", [plain, nested, with_middleware, with_a_signal])
async def test_a_route_is_the_one_that_an_unknown_aiohttp_finds(
    cluster: Cluster, client: ClientSession, make: Callable[[], web.Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers() -> list[Any]:
        server = await cluster.start(make())
        return [
            await ask(client, server, target, method, headers={"x-request-id": "1"})
            for target in ("/here?q=1", "/there", "/inner/here", "/nowhere/at/all")
            for method in ("GET", "POST", "DELETE")
        ]

    known = await answers()
    make_unknown(monkeypatch)
    assert known == await answers()
    assert {status for status, *_ in known} >= {200, 404, 405}


async def test_methods_that_no_standard_has_share_a_label(cluster: Cluster, client: ClientSession) -> None:
    app = web.Application()
    app.router.add_route("*", "/here", told)
    server = await cluster.start(app)
    for method in ("PURGE", "REPORT"):
        assert (await ask(client, server, "/here", method))[0] == 200
    assert server.metrics.requests.values == {("OTHER /here", "200"): 2}


async def test_a_replaced_function_of_aiohttp_sees_every_request(
    cluster: Cluster, client: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tracers do."""
    seen = []
    before = web.StreamResponse.prepare

    @functools.wraps(before)
    async def traced(response: web.StreamResponse, request: web.BaseRequest) -> Any:
        seen.append(request.path)
        return await before(response, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", traced)
    server = await cluster.start(plain())
    for _ in range(3):
        await ask(client, server, "/here")
    assert len(seen) == 3
