"""Request bodies that arrive slowly, or are too large: the client gets an error, and another one its place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from fastapi import FastAPI, Request
from pierhead.replica.server import ReplicaServer

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster

BOUND_S = 0.3


def aiohttp_app(gate: asyncio.Event) -> web.Application:
    async def body(request: web.Request) -> web.Response:
        size = len(await request.read())
        await gate.wait()
        return web.json_response(size)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/", body)
    return app


def fastapi_app(gate: asyncio.Event) -> FastAPI:
    async def body(request: Request) -> int:
        size = len(await request.body())
        await gate.wait()
        return size

    app = FastAPI()
    app.add_api_route("/", body, methods=["POST"])
    return app


def bare_asgi(gate: asyncio.Event) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":  # it does not read what comes
            await gate.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"0"})

    return app


Make = Callable[[asyncio.Event], object]
each_kind = pytest.mark.parametrize("make", [aiohttp_app, fastapi_app])


class Client:
    """A connection with one request on it whose body is for the test to send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def post(cls, server: ReplicaServer, length: int | None, body: bytes = b"") -> Client:
        """`length`: None = in chunks."""
        client = cls(*await asyncio.open_connection("127.0.0.1", server.http_port))
        kind = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        client.writer.write(f"POST / HTTP/1.1\r\nHost: x\r\n{kind}\r\n\r\n".encode() + body)
        return client

    async def answer(self) -> tuple[int, dict[str, str]]:
        """Status and error of an answer after which the server closes the connection."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)).decode().lower()
        assert "connection: close" in head
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = await self.reader.readexactly(length)
        self.writer.close()
        return int(head.split()[1]), json.loads(body)["error"]


@each_kind
async def test_a_body_that_does_not_arrive_is_answered_and_its_place_is_free(cluster: Cluster, make: Make) -> None:
    server = await cluster.start(make(asyncio.Event()), body_timeout_s=BOUND_S, max_ongoing_requests=2)
    for client in [await Client.post(server, 10, b"x") for _ in range(2)]:
        status, error = await client.answer()
        assert (status, error["code"]) == (408, "body_timeout")
        assert error["message"] == "the request's body has not arrived within 0.3 s; send it faster, or less at a time"
    assert server.readiness().ongoing == 0


@each_kind
async def test_a_body_that_has_arrived_leaves_the_work_its_time(cluster: Cluster, make: Make) -> None:
    gate = asyncio.Event()
    server = await cluster.start(make(gate), body_timeout_s=BOUND_S)
    client = await Client.post(server, 2, b"x")
    client.writer.write(b"y")
    asyncio.get_running_loop().call_later(2 * BOUND_S, gate.set)
    head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert head.startswith(b"HTTP/1.1 200")
    client.writer.close()


async def test_a_body_that_the_application_does_not_take_is_not_the_client_s_fault(cluster: Cluster) -> None:
    gate = asyncio.Event()
    server = await cluster.start(bare_asgi(gate), body_timeout_s=BOUND_S)
    client = await Client.post(server, 1 << 24, b"x" * (1 << 20))
    asyncio.get_running_loop().call_later(2 * BOUND_S, gate.set)
    head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert head.startswith(b"HTTP/1.1 200")
    client.writer.close()


@each_kind
async def test_a_body_that_may_take_as_long_as_the_request_has_no_bound(cluster: Cluster, make: Make) -> None:
    server = await cluster.start(make(asyncio.Event()), request_timeout_s=BOUND_S, body_timeout_s=BOUND_S)
    client = await Client.post(server, 10, b"x")
    assert (await asyncio.wait_for(client.reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 504")
    client.writer.close()


@pytest.mark.parametrize("length", [2_000_000, None], ids=["announced", "in chunks"])
async def test_an_asgi_application_gets_no_larger_body_than_is_taken(cluster: Cluster, length: int | None) -> None:
    server = await cluster.start(fastapi_app(asyncio.Event()), max_body_bytes=1_000_000)
    chunk = b"" if length else b"f4241\r\n" + b"x" * 1_000_001
    status, error = await (await Client.post(server, length, chunk)).answer()
    assert (status, error["code"]) == (413, "payload_too_large")
    assert error["message"] == (
        "the request body is larger than the 1000000 bytes that this service takes; send less at a time"
    )
    assert server.readiness().ongoing == 0
