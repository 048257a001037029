"""A FastAPI application, as it would run under uvicorn alone, behind the edge; and ASGI without any framework.

What holds for aiohttp and ASGI alike is in test_http.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, web
from fastapi import BackgroundTasks, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pierhead import BadRequest, asgi, current_request, handle
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.http.asgi_edge import AsgiEdge, is_asgi
from pierhead.http.asgi_exchange import LISTEN_AFTER_S, STARLETTE_S_500

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, EchoService, echo, errors, generate, until

child = handle(EchoStub, "echo-child")


class Site:
    """An application and what happened in it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0
        self.ended: list[str] = []
        self.life: list[str] = []
        self.app = FastAPI(lifespan=self.lifespan)
        add = self.app.add_api_route
        add("/items/{id}", self.item)
        add("/wait", self.wait)
        add("/wait-with-body", self.wait, methods=["POST"])
        add("/child", self.child)
        add("/fail/{how}", self.fail)
        add("/stream", self.stream)
        add("/tokens", self.tokens)
        add("/steps", self.steps)
        add("/body", self.body, methods=["POST"])
        add("/background", self.background)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.life.append("started")
        yield
        self.life.append("stopped")

    @property
    def cancelled(self) -> int:
        return self.ended.count("cancelled")

    async def item(self, id: str) -> dict[str, Any]:  # noqa: A002 - the route's name for it
        context = current_request()
        assert context is not None
        return {"id": id, "trace": context.traceparent, "left": round(context.remaining_s())}

    async def wait(self) -> dict[str, Any]:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        return {}

    async def child(self, message: str) -> dict[str, str]:
        reply = await child.Echo(echo(message))
        return {"response": reply.response}

    async def fail(self, how: str) -> Any:
        match how:
            case "bad":
                raise BadRequest("user_id: expected an integer >= 0, found -1")
            case "teapot":
                raise HTTPException(418, "short and stout", {"x-pot": "tea"})
            case "own":
                return JSONResponse({"mine": True}, 500)
            case "alike":
                return JSONResponse("Internal Server Error", 500)
        raise ValueError("boom")

    async def stream(self, fail: str = "") -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            if fail == "bad":
                raise BadRequest("fail: expected anything else")
            if fail == "first":
                raise ValueError("before the first piece")
            yield "one\n"
            if fail:
                raise ValueError("in the middle")

        return StreamingResponse(pieces())

    async def tokens(self) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            async for token in child.Generate(generate("wait")):
                yield f"{token.index}\n"

        return StreamingResponse(pieces())

    async def steps(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def body(self, request: Request) -> dict[str, int]:
        self.begun += 1
        await self.gate.wait()
        pieces = [piece async for piece in request.stream()]
        return {"bytes": len(b"".join(pieces))}

    async def background(self, tasks: BackgroundTasks) -> dict[str, Any]:
        tasks.add_task(self.gate.wait)
        return {"later": True}


@pytest.fixture
async def site() -> Site:
    return Site()


async def start(cluster: Cluster, site: Site, **settings: Any) -> tuple[Any, str]:
    server = await cluster.start(site.app, service="api", **settings)
    return server, f"http://127.0.0.1:{server.http_port}"


async def test_an_application_moves_in_unchanged(cluster: Cluster, site: Site, client: ClientSession) -> None:
    server, url = await start(cluster, site)
    async with client.get(f"{url}/items/7", headers={"x-request-id": "mine"}) as response:
        told = await response.json()
        assert 30 < told.pop("left") <= 60
        assert told == {"id": "7", "trace": None}
        assert response.headers["x-request-id"] == "mine"
    async with client.get(f"{url}/openapi.json") as response:
        assert len(response.headers["x-request-id"]) == 16
        assert "/items/{id}" in (await response.json())["paths"]
    assert server.metrics.requests.values[("GET /items/{id}", "200")] == 1
    assert site.life == ["started"]
    await cluster.drained(server)
    assert site.life == ["started", "stopped"]


async def test_labels_are_routes_as_declared(cluster: Cluster, site: Site, client: ClientSession) -> None:
    server, url = await start(cluster, site)
    for method, path in (("GET", "/items/1"), ("GET", "/items/2"), ("GET", "/nowhere"), ("DELETE", "/items/1")):
        async with client.request(method, url + path):
            pass
    assert server.metrics.requests.values == {
        ("GET /items/{id}", "200"): 2,
        ("unmatched", "404"): 1,
        ("DELETE /items/{id}", "405"): 1,
    }


class TestErrors:
    @pytest.mark.parametrize(
        ("how", "status", "body"),
        [
            ("teapot", 418, {"detail": "short and stout"}),
            ("own", 500, {"mine": True}),
            ("alike", 500, "Internal Server Error"),
        ],
    )
    async def test_the_application_s_own_answers_stay_as_they_are(
        self, cluster: Cluster, site: Site, client: ClientSession, how: str, status: int, body: Any
    ) -> None:
        _, url = await start(cluster, site)
        async with client.get(f"{url}/fail/{how}") as response:
            assert (response.status, await response.json()) == (status, body)

    async def test_an_own_handler_for_every_exception_is_respected(
        self, cluster: Cluster, site: Site, client: ClientSession
    ) -> None:
        async def mine(_: Request, error: Exception) -> JSONResponse:
            return JSONResponse({"oops": str(error)}, 500)

        site.app.add_exception_handler(ValueError, mine)
        site.app.add_exception_handler(Exception, mine)
        _, url = await start(cluster, site)
        async with client.get(f"{url}/fail/boom") as response:
            assert (response.status, await response.json()) == (500, {"oops": "boom"})

    @pytest.mark.parametrize(("how", "status"), [("first", 500), ("bad", 400)])
    async def test_a_stream_that_fails_before_its_first_piece_has_the_status_of_the_failure(
        self, cluster: Cluster, site: Site, client: ClientSession, how: str, status: int
    ) -> None:
        asgi(site.app)
        server, url = await start(cluster, site)
        async with client.get(f"{url}/stream?fail={how}") as response:
            error = (await response.json())["error"]
            assert (response.status, error["request_id"]) == (status, response.headers["x-request-id"])
        assert ("GET /stream", str(status)) in server.metrics.requests.values


class TestWithoutAnEdge:
    """As under httpx's ASGITransport."""

    @staticmethod
    async def answer_of(app: Any, path: str) -> tuple[int, Any]:
        sent: list[Any] = []

        bodies = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            return bodies.pop() if bodies else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        path, _, query = path.partition("?")
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": [], "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("x", 1),
            "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, receive, send)
        return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))

    async def test_an_error_of_the_runtime_is_its_answer(self, site: Site) -> None:
        app = asgi(asgi(site.app).app).app
        for path in ("/fail/bad", "/stream?fail=bad"):
            status, body = await self.answer_of(app, path)
            assert (status, body["error"]["code"]) == (400, "bad_request")
        with pytest.raises(ValueError, match="boom"):
            await self.answer_of(app, "/fail/boom")

    async def test_an_own_handler_comes_first(self, site: Site) -> None:
        async def mine(_: Request, error: Exception) -> JSONResponse:
            return JSONResponse({"mine": str(error)}, 418)

        site.app.add_exception_handler(BadRequest, mine)
        status, body = await self.answer_of(asgi(site.app).app, "/fail/bad")
        assert (status, list(body)) == (418, ["mine"])


class TestMounted:
    """Behind a route that HAProxy has taken off the path."""

    async def test_links_lead_back_and_routes_are_the_application_s_own(
        self, cluster: Cluster, site: Site, client: ClientSession
    ) -> None:
        inner = FastAPI()
        inner.add_api_route("/inner", site.steps)
        site.app.mount("/sub", inner)
        server, url = await start(cluster, site)
        headers = {"x-forwarded-prefix": "/shop"}
        async with client.get(f"{url}/docs", headers=headers) as response:
            assert "url: '/shop/openapi.json'" in await response.text()
        for path, status in (("/items/7", 200), ("/sub/inner", 200), ("/nowhere", 404)):
            async with client.get(url + path, headers=headers) as response:
                assert response.status == status, path
        async with client.get(f"{url}/items/7/", headers=headers, allow_redirects=False) as response:
            assert response.headers["location"].endswith("/shop/items/7")
        assert ("GET /items/{id}", "200") in server.metrics.requests.values


class TestClientThatLeaves:
    @pytest.mark.parametrize(
        ("method", "path", "body"),
        [("GET", "/wait", b""), ("POST", "/wait-with-body", b"x" * 1000)],
        ids=["without a body", "with a body that is not read"],
    )
    async def test_it_cancels(
        self, cluster: Cluster, site: Site, caplog: pytest.LogCaptureFixture, method: str, path: str, body: bytes
    ) -> None:
        server, url = await start(cluster, site)
        async with ClientSession() as client:
            asking = asyncio.ensure_future(client.request(method, url + path, data=body).__aenter__())
            await until(lambda: site.begun == 1, "the request is in flight")
            asking.cancel()
            await asyncio.wait([asking])
        await until(lambda: site.ended == ["cancelled"], "it is cancelled")
        await until(lambda: server.readiness().ongoing == 0, "the count is back")
        assert server.metrics.requests.values == {(f"{method} {path}", "499"): 1}
        assert not errors(caplog)

    @pytest.mark.parametrize("size", [0, 10, 1_000_000])
    async def test_listening_takes_nothing_of_a_body(
        self, cluster: Cluster, site: Site, client: ClientSession, size: int
    ) -> None:
        """The handler reads late: by then somebody has listened for the client, and so has read ahead."""
        _, url = await start(cluster, site)
        asking = asyncio.ensure_future(client.post(f"{url}/body", data=bytes(size)).__aenter__())
        await until(lambda: site.begun == 1, "the handler has begun")
        await asyncio.sleep(0.05)
        site.gate.set()
        response = await asking
        assert await response.json() == {"bytes": size}
        response.release()

    async def test_there_is_one_reader_at_a_time(self, cluster: Cluster) -> None:
        """The application reads when somebody would begin to listen. ASGI allows no two to do it at once."""
        server = await cluster.start(FastAPI())
        pieces = [b"a", b"b", b"c"]
        readers, most = 0, 0

        async def receive() -> Any:
            nonlocal readers, most
            readers += 1
            most = max(most, readers)
            await asyncio.sleep(3 * LISTEN_AFTER_S)
            readers -= 1
            if not pieces:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            more = True
            while more:
                message = await receive()
                read.append(message["body"])
                more = message["more_body"]
                await asyncio.sleep(LISTEN_AFTER_S)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

        async def send(message: Any) -> None: ...

        read: list[bytes] = []
        await AsgiEdge(app, server.edge)({"type": "http", "method": "POST", "headers": []}, receive, send)
        assert (read, most) == ([b"a", b"b", b"c"], 1)


class TestDrain:
    async def test_it_ends_at_its_timeout(self, cluster: Cluster, site: Site, client: ClientSession) -> None:
        server, url = await start(cluster, site, drain_timeout_s=0.2)
        asking = asyncio.ensure_future(client.get(f"{url}/wait").__aenter__())
        await until(lambda: site.begun == 1, "one request is in flight")
        await cluster.drained(server)
        response = await asking
        assert (response.status, (await response.json())["error"]["code"]) == (502, "replica_died")
        assert site.ended == ["cancelled"]
        response.release()

    async def test_work_after_the_response_counts(self, cluster: Cluster, site: Site, client: ClientSession) -> None:
        server, url = await start(cluster, site)
        async with client.get(f"{url}/background") as response:
            assert await response.json() == {"later": True}
        assert server.readiness().ongoing == 1
        site.gate.set()
        await until(lambda: server.readiness().ongoing == 0, "the count is back")
        assert server.metrics.requests.values == {("GET /background", "200"): 1}


class TestParts:
    async def test_what_is_an_asgi_application(self) -> None:
        async def plain(scope: Any, receive: Any, send: Any) -> None: ...
        async def two(scope: Any, receive: Any) -> None: ...
        def sync(scope: Any, receive: Any, send: Any) -> None: ...

        class Checked:
            async def check_health(self) -> None: ...

        assert is_asgi(FastAPI())
        assert is_asgi(plain)
        for other in (two, sync, Checked(), EchoService(), web.Application(), FastAPI, "app"):
            assert not is_asgi(other), other

    async def test_without_any_framework(self, cluster: Cluster, client: ClientSession) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert scope["type"] == "http"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hi"})

        server = await cluster.start(asgi(app))
        async with client.get(f"http://127.0.0.1:{server.http_port}/some/path") as response:
            assert await response.text() == "hi"
        assert server.metrics.requests.values == {("GET *", "200"): 1}, "whose routes are not known; never a path"

    async def test_a_lifespan_that_fails_fails_the_start(self, cluster: Cluster) -> None:
        @asynccontextmanager
        async def broken(app: FastAPI) -> AsyncIterator[None]:
            if not app.extra:
                raise ValueError("no database")
            yield

        with pytest.raises(RuntimeError, match="lifespan has failed"):
            await cluster.start(FastAPI(lifespan=broken))


async def test_a_server_without_denial_responses_gets_a_close(cluster: Cluster) -> None:
    sent: list[dict[str, Any]] = []
    server = await cluster.start(FastAPI(), max_ongoing_requests=1)
    server._admission.enter()

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await AsgiEdge(FastAPI(), server.edge)({"type": "websocket", "headers": [], "path": "/"}, receive, send)
    server._admission.leave()
    assert sent == [{"type": "websocket.close", "code": 1013, "reason": "backpressure"}]


def test_the_text_that_is_held_back_is_starlette_s() -> None:
    """If Starlette changes it, unhandled exceptions are no longer answered in the one shape."""
    from starlette.middleware.errors import ServerErrorMiddleware

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    response = ServerErrorMiddleware(app).error_response(None, ValueError())
    assert response.body == STARLETTE_S_500
    assert json.dumps("Internal Server Error").encode() != STARLETTE_S_500


@pytest.mark.parametrize("size", [0, 3])
async def test_a_client_of_http_1_0_gets_a_stream_in_plain_bytes_up_to_the_end(cluster: Cluster, size: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(size):
            await send({"type": "http.response.body", "body": b"piece %d\n" % number, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    server = await cluster.start(app)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"transfer-encoding" not in head.lower()
    assert body == b"".join(b"piece %d\n" % number for number in range(size))
