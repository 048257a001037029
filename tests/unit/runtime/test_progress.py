"""`progress` of /readyz: another number whenever work has moved, the same while it stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWSTimeout, web
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pierhead import handle
from pierhead.echo.v1.echo_pb2 import GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.replica.tally import Tally, tally

from tests.unit.runtime.harness import Cluster, EchoService, generate, know, until

child = handle(EchoStub, "echo-child")


class Told:
    """A source that gives one item each time it is told to."""

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
    assert tally(counts) == Tally(answered=10, errors=7, in_time=5)
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


async def test_chunks_of_an_http_stream_are_progress(cluster: Cluster) -> None:
    source = Told()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(await source.turn())

    app = web.Application()
    app.router.add_get("/stream", stream)
    server = await cluster.start(app)
    url = f"http://127.0.0.1:{server.http_port}/stream"
    async with ClientSession() as client, client.get(url):
        await moves(lambda: server.readiness().progress, source)
    await until(lambda: server.readiness().ongoing == 0, "the request has ended")


async def test_messages_of_a_websocket_are_progress(cluster: Cluster) -> None:
    source = Told()

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        while True:
            await socket.send_bytes(await source.turn())

    app = web.Application()
    app.router.add_get("/talk", talk)
    server = await cluster.start(app)
    url = f"http://127.0.0.1:{server.http_port}/talk"
    # Nobody reads there, and so nobody says goodbye.
    impatient = ClientWSTimeout(ws_close=0.1)
    async with ClientSession() as client, client.ws_connect(url, timeout=impatient):
        await moves(lambda: server.readiness().progress, source)


async def test_messages_of_an_asgi_application_are_progress(cluster: Cluster) -> None:
    source = Told()
    app = FastAPI()

    async def stream() -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield await source.turn()

        return StreamingResponse(pieces())

    app.add_api_route("/stream", stream)
    server = await cluster.start(app)
    async with ClientSession() as client, client.get(f"http://127.0.0.1:{server.http_port}/stream"):
        await moves(lambda: server.readiness().progress, source)
