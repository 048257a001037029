"""`progress` of /readyz: another number whenever work has moved, the same while it stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWSTimeout, web
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pierhead import handle
from pierhead.echo.v1.echo_pb2 import EchoReply, EchoRequest, GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.replica.tally import RequestTally, tally

from tests.unit.runtime.harness import Cluster, EchoService, echo, generate, know, until

child = handle(EchoStub, "echo-child")


class Told:
    """A source that gives one item each time the test asks for one."""

    def __init__(self) -> None:
        self.next = asyncio.Semaphore(0)

    async def turn(self) -> bytes:
        await self.next.acquire()
        return b"item\n"


async def moves(progress: Callable[[], int], source: Told) -> None:
    """Each item that is sent is seen, and nothing is seen where none is."""
    for _ in range(3):
        before = progress()
        await asyncio.sleep(0)
        assert progress() == before
        source.next.release()
        await until(lambda before=before: progress() != before, "the message was seen")  # type: ignore[misc]


async def test_answers_are_progress_and_missed_deadlines_are_not() -> None:
    counts: dict[tuple[str, ...], float] = {
        ("m", "OK"): 3.0,
        ("m", "INTERNAL"): 2.0,
        ("m", "DEADLINE_EXCEEDED"): 4.0,
        ("m", "504"): 1.0,
    }
    assert tally(counts) == RequestTally(answered=10, errors=7, in_time=5)
    assert tally({("m", "RESOURCE_EXHAUSTED"): 9.0, ("m", "CANCELLED"): 9.0, ("m", "503"): 9.0}).in_time == 0


class Slow(EchoService):
    """Streams what the test tells it to."""

    def __init__(self, source: Told) -> None:
        super().__init__()
        self.source = source

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[Token]:
        async for token in super().Generate(request, context):
            await self.source.turn()
            yield token


class Described(EchoService):
    """Echo tells of the service itself; each call ends when the test says so."""

    __no_use__ = frozenset({"Echo"})

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.end = asyncio.Event(), asyncio.Event()

    async def Echo(self, request: EchoRequest, context: Any) -> EchoReply:
        self.entered.set()
        await self.end.wait()
        return await super().Echo(request, context)


@pytest.mark.parametrize("transport", ["lane", "grpc"])
async def test_a_call_that_asks_about_the_service_is_no_use_of_it(cluster: Cluster, transport: str) -> None:
    service = Described()
    server = await cluster.start(service)
    know(server, transport=transport)
    asking = asyncio.ensure_future(child.Echo(echo()))
    await until(service.entered.is_set, "the call is in flight")
    assert server.readiness().ongoing == 0
    service.end.set()
    await asking
    about = server.readiness()
    assert (about.used, about.answered) == (0, 1), "a rollout counts it: its version has answered"
    assert [token.index async for token in child.Generate(generate(num_tokens=2))] == [0, 1]
    assert (server.readiness().used, server.readiness().answered) == (1, 2)


class SlowWriter(Slow):
    """The same in gRPC's other form: it writes by itself."""

    async def Generate(self, request: GenerateRequest, context: Any) -> None:  # type: ignore[override]
        async for token in super().Generate(request, context):
            await context.write(token)


@pytest.mark.parametrize("kind", [Slow, SlowWriter])
@pytest.mark.parametrize("transport", ["lane", "grpc"])
async def test_messages_of_a_grpc_stream_are_progress(cluster: Cluster, transport: str, kind: type[Slow]) -> None:
    source = Told()
    server = await cluster.start(kind(source))
    know(server, transport=transport)
    call = child.Generate(generate(num_tokens=100))
    reading = asyncio.ensure_future(anext(aiter(call)))
    await until(lambda: server.readiness().ongoing == 1, "the call is in flight")
    await moves(lambda: server.readiness().progress, source)
    assert (await reading).index == 0
    call.cancel()


def aiohttp_app(source: Told, kind: type[web.StreamResponse]) -> web.Application:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = kind()
        await response.prepare(request)
        send = response.send_bytes if isinstance(response, web.WebSocketResponse) else response.write
        while True:
            await send(await source.turn())

    app = web.Application()
    app.router.add_get("/", handle)
    return app


STREAM, WEBSOCKET = (partial(aiohttp_app, kind=kind) for kind in (web.StreamResponse, web.WebSocketResponse))


def asgi_stream(source: Told) -> FastAPI:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield await source.turn()

    app = FastAPI()
    app.add_api_route("/", lambda: StreamingResponse(pieces()))
    return app


@pytest.mark.parametrize("make", [STREAM, WEBSOCKET, asgi_stream], ids=["stream", "websocket", "asgi"])
async def test_what_is_sent_over_http_is_progress(cluster: Cluster, make: Callable[[Told], object]) -> None:
    source = Told()
    server = await cluster.start(make(source))
    if make is asgi_stream:
        source.next.release()  # the head of the response goes with it
    async with ClientSession(f"http://127.0.0.1:{server.http_port}") as client:
        # The WebSocket's handler does not read, and so does not answer a goodbye.
        opened: Any = (
            client.ws_connect("/", timeout=ClientWSTimeout(ws_close=0.1)) if make is WEBSOCKET else client.get("/")
        )
        async with opened:
            await moves(lambda: server.readiness().progress, source)
    await until(lambda: server.readiness().ongoing == 0, "the request has ended")
