"""Routes that are remembered lead where aiohttp's own walk does."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web
from pierhead.replica.server import ReplicaServer
from yarl import URL

from tests.unit.runtime.harness import Cluster

Next = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
        return response.status, await response.json(content_type=None)


async def test_the_second_request_finds_what_the_first_found(cluster: Cluster, client: ClientSession) -> None:
    server = await cluster.start(plain())
    for target, method in [("/here?q=1", "GET"), ("/here", "POST"), ("/there", "GET")]:
        first, second = [await ask(client, server, target, method) for _ in range(2)]
        assert first == second
        assert first[0] == 200
        assert first[1]["app"]
        assert first[1]["apps"] == 1
    for _ in range(2):
        assert (await ask(client, server, "/here", "DELETE"))[0] == 405
    assert 'method="GET /here"' in server.metrics.expose().decode()


async def test_an_expectation_is_answered_on_a_remembered_path_too(cluster: Cluster, client: ClientSession) -> None:
    server = await cluster.start(plain())
    for _ in range(2):
        status, _ = await ask(client, server, "/here", "POST", data=b"x", expect100=True)
        assert status == 200


async def test_methods_that_no_standard_has_share_a_label(cluster: Cluster, client: ClientSession) -> None:
    app = web.Application()
    app.router.add_route("*", "/here", told)
    server = await cluster.start(app)
    for method in ("PURGE", "REPORT"):
        assert (await ask(client, server, "/here", method))[0] == 200
    assert server.metrics.requests.values == {("OTHER /here", "200"): 2}


async def test_middlewares_see_every_request(cluster: Cluster, client: ClientSession) -> None:
    seen = []

    @web.middleware
    async def watch(request: web.Request, handler: Next) -> web.StreamResponse:
        seen.append(request.path)
        return await handler(request)

    app = web.Application(middlewares=[watch])
    app.router.add_get("/here", told)
    server = await cluster.start(app)
    for _ in range(3):
        await ask(client, server, "/here")
    assert len(seen) == 3


async def test_applications_in_an_application(cluster: Cluster, client: ClientSession) -> None:
    app = web.Application()
    app.add_subapp("/inner", plain())
    app.router.add_get("/here", told)
    server = await cluster.start(app)
    for _ in range(2):
        assert (await ask(client, server, "/inner/here"))[1]["apps"] == 2
        assert (await ask(client, server, "/here"))[1]["apps"] == 1


async def test_resources_that_look_at_more_than_the_path(cluster: Cluster, client: ClientSession) -> None:
    class ByHeader(web.PlainResource):
        async def resolve(self, request: web.Request) -> Any:
            if "x-new" not in request.headers:
                return None, set()
            return await super().resolve(request)

    async def new(_: web.Request) -> web.Response:
        return web.json_response("new")

    app = web.Application()
    resource = ByHeader("/here")
    resource.add_route("GET", new)
    app.router.register_resource(resource)
    app.add_routes([web.get("/there", told), web.get("/here", told)])
    server = await cluster.start(app)
    for _ in range(2):
        assert (await ask(client, server, "/here"))[1] != "new"
        assert (await ask(client, server, "/here", headers={"x-new": "1"}))[1] == "new"


async def test_an_application_that_looks_at_its_responses_is_shown_each(
    cluster: Cluster, client: ClientSession
) -> None:
    async def mark(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Marked"] = "1"

    inner, app = plain(), web.Application()
    inner.on_response_prepare.append(mark)
    app.add_subapp("/inner", inner)
    server = await cluster.start(app)
    for _ in range(2):
        async with client.get(f"http://127.0.0.1:{server.http_port}/inner/here") as response:
            assert response.headers["X-Marked"] == "1"


async def test_a_replaced_function_of_aiohttp_sees_every_request(
    cluster: Cluster, client: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tracers do."""
    seen = []
    before = web.Application._handle

    @functools.wraps(before)
    async def traced(app: web.Application, request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        return await before(app, request)

    monkeypatch.setattr(web.Application, "_handle", traced)
    server = await cluster.start(plain())
    for _ in range(3):
        await ask(client, server, "/here")
    assert len(seen) == 3
