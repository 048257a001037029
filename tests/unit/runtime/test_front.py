"""The front of `dev`: which service gets a request, and that bytes pass in both directions as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession, WSMsgType, web
from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.runner.front import Front
from pierhead.runner.runner import FrontRoute

from tests.unit.runtime.harness import until


class Site:
    """A service's HTTP server, and what it has seen."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0
        self.left = 0
        self.seen: list[web.Request] = []
        self.port = 0

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        return runner

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        if request.path.endswith("/socket"):
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            async for message in socket:
                await socket.send_str(f"you said {message.data}")
            return socket
        if request.path.endswith("/wait"):
            self.begun += 1
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.left += 1
                raise
        body = await request.read()
        return web.json_response({"path": request.raw_path, "bytes": len(body)})

    def route(self, path: str, *others: int, **more: Any) -> FrontRoute:
        limit = more.pop("max_ongoing", 100)
        ends = [Endpoint(str(port), f"127.0.0.1:{port}", max_ongoing_requests=limit) for port in (self.port, *others)]
        listing = ReplicaListing(ends, max_queued_requests=more.pop("max_queued", -1))
        name, timeout_s = more.pop("name", path.strip("/") or "root"), more.pop("timeout_s", 30.0)
        return FrontRoute(path, name, listing, timeout_s, **more)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    runner = await made.start()
    yield made
    made.gate.set()
    await runner.cleanup()


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    made = Front()
    yield made
    await made.close()


async def answer_of(client: ClientSession, url: str, **more: Any) -> tuple[int, Any, Any]:
    async with client.request(more.pop("method", "GET"), url, **more) as response:
        return response.status, await response.json(), response.headers


class TestRoutes:
    @pytest.mark.parametrize(
        ("path", "service", "inner"),
        [
            ("/", "root", "/"),
            ("/ax?x=/a", "root", "/ax?x=/a"),
            ("/a", "a", "/a"),
            ("/a/bc", "a", "/a/bc"),
            ("/a/b", "b", "/a/b"),
            ("/a/b/c?d=e%20f", "b", "/a/b/c?d=e%20f"),
            ("/cut", "cut", "/"),
            ("/cut/", "cut", "/"),
            ("/cut/x/y?z=1", "cut", "/x/y?z=1"),
        ],
    )
    def test_the_longest_prefix_decides(self, site: Site, path: str, service: str, inner: str) -> None:
        routes = [
            site.route("/"), site.route("/a"), site.route("/a/b", name="b"), site.route("/cut", strip_prefix=True),
        ]  # fmt: skip
        front = Front()
        front.switch(routes, None)
        plain, mark, query = path.partition("?")
        found = front._route_of(plain)
        assert (found.service, found.inner(plain) + mark + query) == (service, inner)

    async def test_a_path_without_a_route_is_answered_as_haproxy_does(
        self, site: Site, front: Front, client: ClientSession
    ) -> None:
        url = f"http://127.0.0.1:{await front.listen('127.0.0.1', 0)}"
        front.switch([site.route("/a"), site.route("/a/b", name="b")], None)
        status, body, headers = await answer_of(client, f"{url}/nowhere", headers={"x-request-id": "mine"})
        assert (status, headers["x-request-id"]) == (404, "mine")
        assert body["error"] == {
            "code": "route_not_found",
            "message": 'No route takes "/nowhere". The routes are /a, /a/b.',
            "routes": {"/a": "a", "/a/b": "b"},
            "request_id": "mine",
        }

    async def test_what_a_service_gets(self, site: Site, front: Front, client: ClientSession) -> None:
        url = f"http://127.0.0.1:{await front.listen('127.0.0.1', 0)}"
        front.switch([site.route("/cut", strip_prefix=True), site.route("/a")], None)
        sent = {"x-forwarded-prefix": "/admin", "x-forwarded-proto": "https", "x-mine": "1"}
        status, body, _ = await answer_of(client, f"{url}/cut/x?y=1", method="POST", data=b"x" * 300_000, headers=sent)
        assert (status, body) == (200, {"path": "/x?y=1", "bytes": 300_000})
        headers = site.seen[-1].headers
        assert (headers["x-forwarded-prefix"], headers["x-mine"]) == ("/cut", "1")
        assert (headers["x-forwarded-for"], headers["x-forwarded-proto"]) == ("127.0.0.1", "https")
        assert headers["x-forwarded-host"] == url.removeprefix("http://")
        await answer_of(client, f"{url}/a", headers=sent)
        assert "x-forwarded-prefix" not in site.seen[-1].headers


async def test_the_next_request_goes_by_the_newest_routes(site: Site, front: Front, client: ClientSession) -> None:
    url = f"http://127.0.0.1:{await front.listen('127.0.0.1', 0)}"
    front.switch([site.route("/a")], None)
    waiting = asyncio.create_task(answer_of(client, f"{url}/a/wait"))
    await until(lambda: site.begun == 1, "it is in flight")
    front.switch([site.route("/b")], None)
    assert (await answer_of(client, f"{url}/a"))[0] == 404
    site.gate.set()
    assert (await waiting)[0] == 200, "it ended where it was"


async def test_a_websocket_passes(site: Site, front: Front, client: ClientSession) -> None:
    url = f"http://127.0.0.1:{await front.listen('127.0.0.1', 0)}"
    front.switch([site.route("/a")], None)
    async with client.ws_connect(f"{url}/a/socket") as socket:
        await socket.send_str("hi")
        message = await socket.receive()
        assert (message.type, message.data) == (WSMsgType.TEXT, "you said hi")


async def test_a_client_that_leaves_ends_its_request(site: Site, front: Front) -> None:
    port = await front.listen("127.0.0.1", 0)
    front.switch([site.route("/")], None)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: site.begun == 1, "it is in flight")
    writer.close()
    await until(lambda: site.left == 1, "the handler was cancelled")


class TestBounds:
    async def test_requests_wait_in_a_bounded_line(self, site: Site, front: Front, client: ClientSession) -> None:
        url = f"http://127.0.0.1:{await front.listen('127.0.0.1', 0)}"
        route = site.route("/", max_ongoing=1, max_queued=1, refusal_status=429, retry_after_s=1.5)
        front.switch([route], None)
        asked = [asyncio.create_task(answer_of(client, f"{url}/wait")) for _ in range(2)]
        await until(lambda: site.begun == 1 and front.waiting("root") == 1, "one is in flight, one waits")
        status, body, headers = await answer_of(client, url)
        assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "queue_full", "2")
        site.gate.set()
        assert [status for status, *_ in await asyncio.gather(*asked)] == [200, 200]

    async def test_a_wait_ends(self, site: Site, front: Front, client: ClientSession) -> None:
        url = f"http://127.0.0.1:{await front.listen('127.0.0.1', 0)}"
        front.switch([site.route("/", max_ongoing=1, timeout_s=0.05)], None)
        first = asyncio.create_task(answer_of(client, f"{url}/wait"))
        await until(lambda: site.begun == 1, "it is full")
        status, body, _ = await answer_of(client, url)
        assert (status, body["error"]["code"]) == (503, "overloaded")
        site.gate.set()
        await first


async def test_requests_wait_for_the_first_outcome(site: Site, front: Front, client: ClientSession) -> None:
    url = f"http://127.0.0.1:{await front.listen('127.0.0.1', 0)}"
    asked = asyncio.create_task(answer_of(client, f"{url}/a"))
    await until(lambda: bool(front._serving), "it waits")
    front.fail("shop:shop could not be loaded: NameError: x")
    status, body, _ = await asked
    assert (status, body["error"]["code"]) == (503, "not_loaded")
    assert body["error"]["message"] == "shop:shop could not be loaded: NameError: x"
    front.switch([site.route("/")], None)
    assert (await answer_of(client, f"{url}/a"))[0] == 200


@pytest.mark.parametrize(
    "head", [b"nonsense\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"x" * 40_000]
)
async def test_what_is_no_request_is_answered(front: Front, head: bytes) -> None:
    port = await front.listen("127.0.0.1", 0)
    front.switch([], None)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    status = await reader.readline()
    assert status == b"HTTP/1.1 400 Bad Request\r\n"
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    assert json.loads(body)["error"]["code"] == "bad_request"
    writer.close()
