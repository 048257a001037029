"""What a replica does with its connections, for each kind of service."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from aiohttp import ClientSession, web
from fastapi import FastAPI
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from tests.unit.runtime.harness import Cluster, EchoService, address, echo


def assert_no_delay(port: int | None) -> None:
    """Every socket of this process that was accepted on `port` sends small packets at once."""
    flags = []
    for found in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if found.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(found.name))) as copy:
                    if copy.getsockname()[1:2] == (port,) and copy.getpeername():
                        flags.append(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    assert flags, f"nothing is connected to port {port}"
    assert all(flags), "answers wait for the client's delayed ACK, 40 ms"


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="hi")


def aiohttp_app() -> web.Application:
    app = web.Application()
    app.router.add_get("/", hello)
    return app


def fastapi_app() -> FastAPI:
    app = FastAPI()
    app.add_api_route("/", lambda: "hi")
    return app


@pytest.mark.parametrize("make", [aiohttp_app, fastapi_app, EchoService])
async def test_answers_on_a_reused_connection_leave_at_once(cluster: Cluster, make: Callable[[], object]) -> None:
    server = await cluster.start(make())
    if server.http_port is None:
        async with grpc.aio.insecure_channel(address(server)) as channel:
            await EchoStub(channel).Echo(echo())
            assert_no_delay(server.grpc_port)
    else:
        async with ClientSession(f"http://127.0.0.1:{server.http_port}") as session, session.get("/") as response:
            assert response.status == 200
            assert_no_delay(server.http_port)
