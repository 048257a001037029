"""WebSockets through the edge, with aiohttp's client."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress

import pytest
from aiohttp import ClientSession, WSMsgType, WSServerHandshakeError, web
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pierhead import BadRequest, current_request, handle
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.conftest import make_unknown
from tests.unit.runtime.harness import Cluster, EchoService, echo, errors, know, pass_deadlines, until

child = handle(EchoStub, "echo-child")


class Room:
    """A WebSocket handler, and what happened in it."""

    def __init__(self) -> None:
        self.begun = 0
        self.at_work = False
        self.gate = asyncio.Event()
        self.ended: list[str] = []

    def aiohttp_app(self) -> web.Application:
        async def room(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse(timeout=1)
            await self.wait(request.query)
            await socket.prepare(request)
            with self.life():
                async for message in socket:
                    await socket.send_str(await self.answer(message.data))
            return socket

        async def plain(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.add_routes([web.get("/room", room), web.get("/plain", plain)])
        return app

    def asgi_app(self) -> FastAPI:
        async def room(socket: WebSocket) -> None:
            await self.wait(socket.query_params)
            await socket.accept()
            with self.life(), suppress(WebSocketDisconnect):
                while True:
                    await socket.send_text(await self.answer(await socket.receive_text()))

        app = FastAPI()
        app.add_api_websocket_route("/room", room)
        app.add_api_route("/plain", lambda: "plain")
        return app

    async def wait(self, query: Container[str]) -> None:
        if "late" in query:
            self.at_work = True
            await self.gate.wait()

    @contextmanager
    def life(self) -> Iterator[None]:
        self.begun += 1
        try:
            yield
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise
        self.ended.append("closed")

    async def answer(self, message: str) -> str:
        match message:
            case "boom":
                raise ValueError("boom")
            case "bad":
                raise BadRequest("message: no")
            case "left":
                context = current_request()
                assert context is not None
                return str(context.remaining_s())
            case "work":
                self.at_work = True
                await asyncio.Event().wait()
        reply = await child.Echo(echo(message))
        return reply.response


@pytest.fixture(params=["known aiohttp", "unknown aiohttp", "asgi"])
def app(request: pytest.FixtureRequest, room: Room, monkeypatch: pytest.MonkeyPatch) -> object:
    """The room behind each kind of server."""
    if request.param == "asgi":
        return room.asgi_app()
    if request.param == "unknown aiohttp":
        make_unknown(monkeypatch)
    return room.aiohttp_app()


@pytest.fixture
async def room() -> Room:
    return Room()


async def test_messages_go_both_ways_and_the_handshake_names_the_request(
    cluster: Cluster, room: Room, app: object, client: ClientSession
) -> None:
    service = EchoService()
    know(await cluster.start(service))
    server = await cluster.start(app)
    url = f"http://127.0.0.1:{server.http_port}/room"
    async with client.ws_connect(url, headers={"x-request-id": "mine", "x-session-id": "s-1"}) as socket:
        assert socket._response.headers["x-request-id"] == "mine"
        await socket.send_str("hi")
        assert await socket.receive_str(timeout=PATIENCE_S) == "echo: hi"
        (seen,) = service.seen
        assert seen is not None
        assert (seen.request_id, seen.session_id) == ("mine", "s-1"), "calls made within it belong to it"
        assert server.readiness().ongoing == 1, "it counts for as long as it lives"
    await until(lambda: room.ended == ["closed"], "the handler has ended")
    await until(lambda: server.readiness().ongoing == 0, "the count is back")
    assert server.metrics.requests.values == {("GET /room", "101"): 1}


@pytest.mark.parametrize("headers", [{}, {"x-request-timeout-seconds": "1e308"}], ids=["no deadline", "a late one"])
async def test_it_outlives_the_time_of_a_request_and_so_do_its_calls(
    cluster: Cluster, room: Room, app: object, client: ClientSession, headers: dict[str, str]
) -> None:
    know(await cluster.start(EchoService()))
    server = await cluster.start(app, request_timeout_s=50.0)
    async with client.ws_connect(f"http://127.0.0.1:{server.http_port}/room", headers=headers) as socket:
        pass_deadlines(100.0)
        await socket.send_str("left")
        assert float(await socket.receive_str(timeout=PATIENCE_S)) > 1e6
        await socket.send_str("hi")
        assert await socket.receive_str(timeout=PATIENCE_S) == "echo: hi"


async def test_it_ends_when_its_client_ends(cluster: Cluster, room: Room, app: object, client: ClientSession) -> None:
    server = await cluster.start(app, request_timeout_s=50.0)
    url = f"http://127.0.0.1:{server.http_port}/room"
    async with client.ws_connect(url, headers={"x-request-timeout-seconds": "500"}) as socket:
        pass_deadlines(100.0)
        await socket.send_str("left")
        assert 400 < float(await socket.receive_str(timeout=PATIENCE_S)) <= 500
        pass_deadlines(1000.0)
        message = await socket.receive(timeout=PATIENCE_S)
        assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, 1011, "deadline_exceeded")
    await until(lambda: room.ended == ["CancelledError"], "the handler was cancelled")
    await until(lambda: server.readiness().ongoing == 0, "the count is back")


async def test_a_draining_replica_closes_it_and_takes_no_other(
    cluster: Cluster, room: Room, app: object, client: ClientSession
) -> None:
    server = await cluster.start(app, drain_timeout_s=PATIENCE_S)
    server._admission.enter()  # something else is in flight: the ports stay open until the test has looked
    url = f"http://127.0.0.1:{server.http_port}"
    async with client.ws_connect(f"{url}/room") as socket:
        await until(lambda: room.begun == 1, "the handler has begun")
        assert server.readiness().lasting == 1, "the controller does not wait for it"
        server.stop()
        message = await socket.receive(timeout=PATIENCE_S)
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1012)
        with pytest.raises(WSServerHandshakeError) as refused:
            await client.ws_connect(f"{url}/room")
        assert refused.value.status == 503
        async with client.get(f"{url}/plain") as response:
            assert response.status == 200, "requests, which end by themselves, are still answered"
    assert server.readiness().lasting == 0
    server._admission.leave()
    await cluster.ended(server)
    assert room.ended == ["closed"]


async def test_one_that_would_begin_after_the_drain_has_is_refused(
    cluster: Cluster, room: Room, app: object, client: ClientSession
) -> None:
    """Its request was taken in before: nobody would close it, and the drain would wait for it to its timeout."""
    server = await cluster.start(app, drain_timeout_s=PATIENCE_S)
    asked = asyncio.ensure_future(client.ws_connect(f"http://127.0.0.1:{server.http_port}/room?late"))
    await until(lambda: room.at_work, "the handler has begun, and not accepted yet")
    server.stop()
    await until(lambda: server.state == "draining", "it drains")
    room.gate.set()
    with pytest.raises(WSServerHandshakeError) as refused:
        await asked
    assert refused.value.status == 503
    await cluster.ended(server)
    assert room.begun == 0


async def test_a_drain_does_not_wait_for_a_handler_that_is_at_work(
    cluster: Cluster, room: Room, app: object, client: ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    know(await cluster.start(EchoService()))
    server = await cluster.start(app, drain_timeout_s=0.3)
    async with client.ws_connect(f"http://127.0.0.1:{server.http_port}/room") as socket:
        await socket.send_str("work")
        await until(lambda: room.at_work, "the handler is at work")
        server.stop()
        message = await socket.receive(timeout=PATIENCE_S)
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1012)
        await cluster.ended(server)
    assert room.ended == ["CancelledError"]


@pytest.mark.parametrize(("message", "reason"), [("boom", "internal"), ("bad", "bad_request")])
async def test_a_full_replica_refuses_it_and_a_handler_that_fails_closes_it(
    cluster: Cluster, room: Room, app: object, client: ClientSession, message: str, reason: str
) -> None:
    server = await cluster.start(app, max_ongoing_requests=1)
    url = f"http://127.0.0.1:{server.http_port}/room"
    async with client.ws_connect(url) as socket:
        with pytest.raises(WSServerHandshakeError) as refused:
            await client.ws_connect(url)
        assert refused.value.status == 503
        assert refused.value.headers is not None
        assert refused.value.headers["Retry-After"] == "1"
        await socket.send_str(message)
        closed = await socket.receive(timeout=PATIENCE_S)
        assert (closed.type, closed.data, closed.extra) == (WSMsgType.CLOSE, 1011, reason)
    await until(lambda: server.readiness().ongoing == 0, "the count is back")


async def test_a_client_that_vanishes_cancels_what_is_done_for_it(
    cluster: Cluster, room: Room, aiohttp_version: str, client: ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """Of ASGI applications the next message says that it has: they are not cancelled."""
    service = EchoService()
    know(await cluster.start(service))
    server = await cluster.start(room.aiohttp_app())
    socket = await client.ws_connect(f"http://127.0.0.1:{server.http_port}/room")
    await socket.send_str("wait")
    await until(lambda: service.begun == 1, "the call is at the callee")
    transport = socket._response.connection and socket._response.connection.transport
    assert transport is not None
    transport.abort()
    await until(lambda: service.cancelled == 1, "the work is cancelled")
    await until(lambda: server.readiness().ongoing == 0, "the count is back")
    assert not errors(caplog), "a client that leaves is no error"
