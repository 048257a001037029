"""A replica takes the same requests at its Unix sockets as at its ports, and callers use those that they see."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from pierhead import Settings
from pierhead.calls import directory
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.errors import NoReplica, SettingsError
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.starting import Start

from tests.harness.ports import free_ports
from tests.harness.waiting import until
from tests.unit.runtime.harness import Cluster, EchoService, FakeDiscovery, echo


def aiohttp_application() -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"aiohttp {request.headers['x-forwarded-for']}")

    app = web.Application()
    app.router.add_get("/", answer)
    return app


async def asgi_application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"asgi {scope['client'][0]}".encode()})


def listens(path: str) -> bool:
    """Whether a connection is taken: the file is there a moment earlier."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(path) == 0


async def get(path: str, page: str = "/") -> tuple[int, str]:
    through_haproxy = {"x-forwarded-for": "10.0.0.1, 10.0.0.9"}
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path), headers=through_haproxy) as session:
        answer = await session.get(f"http://replica{page}")
        return answer.status, await answer.text()


@pytest.fixture
def sockets(tmp_path: Path) -> dict[str, str]:
    """The settings of a replica with sockets; an earlier process has left its own there."""
    names = {"socket": str(tmp_path / "1a2b-1"), "admin_socket": str(tmp_path / "1a2b-1.admin")}
    for path in names.values():
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(path)
    return names


@pytest.mark.parametrize(
    ("make", "found"),
    [(aiohttp_application, "aiohttp 10.0.0.1, 10.0.0.9"), (lambda: asgi_application, "asgi 10.0.0.9")],
    ids=["aiohttp", "asgi"],
)
async def test_http_at_a_socket(cluster: Cluster, sockets: dict[str, str], make: Any, found: str) -> None:
    await cluster.start(make(), **sockets)
    assert await get(sockets["socket"]) == (200, found)
    assert (await get(sockets["admin_socket"], "/readyz"))[0] == 200
    assert [os.stat(path).st_mode & 0o777 for path in sockets.values()] == [0o666, 0o666], "HAProxy is another user"


async def test_grpc_at_a_socket(cluster: Cluster, sockets: dict[str, str]) -> None:
    await cluster.start(EchoService(), **sockets)
    async with grpc.aio.insecure_channel(f"unix:{sockets['socket']}") as channel:
        assert (await EchoStub(channel).Echo(echo())).response == "echo: hi"
    assert os.stat(sockets["socket"]).st_mode & 0o777 == 0o666


@pytest.mark.parametrize("part", [aiohttp_application, lambda: asgi_application, EchoService])
@pytest.mark.parametrize("name", ["socket", "admin_socket"])
async def test_a_socket_that_cannot_be_made(cluster: Cluster, part: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"PIERHEAD_SOCKET, PIERHEAD_ADMIN_SOCKET: cannot listen at .*/none/1a2b-1"):
        await cluster.start(part(), **{name: str(tmp_path / "none" / "1a2b-1")})


async def test_progress_of_a_start_at_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "1a2b-1.admin")
    monkeypatch.setenv("PIERHEAD_ADMIN_SOCKET", path)
    monkeypatch.setenv("PIERHEAD_ADMIN_PORT", "0")
    start = Start({"PIERHEAD_REPLICA": "r1"})
    start.report("loading weights", 1, 4)
    try:
        await until(lambda: listens(path), "it listens")
        status, text = await get(path, "/readyz")
        assert (status, "loading weights, 25 %" in text) == (503, True)
    finally:
        start.hand_over()


@pytest.mark.parametrize("part", [aiohttp_application, lambda: asgi_application, EchoService])
@pytest.mark.parametrize("has_socket", [True, False])
async def test_beside_a_socket_the_port_of_requests_is_this_containers_alone(
    cluster: Cluster, sockets: dict[str, str], part: Any, has_socket: bool
) -> None:
    server = await cluster.start(part(), host="0.0.0.0", **(sockets if has_socket else {}))
    port = server.http_port or server.grpc_port
    assert connects("127.0.0.1", port)
    assert connects("127.0.0.2", port) is not has_socket, "127.0.0.2 stands for an address of another container"
    assert connects("127.0.0.2", server.admin_port), "Prometheus reads it from elsewhere"


def connects(host: str, port: Any) -> bool:
    try:
        with socket.create_connection((host, port), 5):
            return True
    except ConnectionRefusedError:
        return False


ELSEWHERE = "unix:/run/of-another-container/1a2b-1"


@pytest.mark.parametrize("transport", ["lane", "grpc"])
@pytest.mark.parametrize("has_socket", [True, False])
async def test_callers_use_the_socket_of_a_replica_that_has_one_and_else_the_port(
    cluster: Cluster, sockets: dict[str, str], transport: str, has_socket: bool
) -> None:
    server = await cluster.start(EchoService(), **sockets)
    port = f"127.0.0.1:{server.grpc_port}"
    at = f"unix:{sockets['socket']}" if has_socket else ""
    async with calling(at, port, transport) as channel:
        assert (await EchoStub(channel).Echo(echo())).response == "echo: hi"
        assert [replica.address for replica in channel.pool().replicas()] == [at or port]


async def test_sockets_that_are_mounted_stand_in_until_the_controller_answers(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "SOCKETS", tmp_path)
    place = tmp_path / "echo-child"
    place.mkdir()
    await cluster.start(EchoService(), socket=str(place / "1a2b-1"), admin_socket=str(place / "1a2b-1.admin"))
    Clients.use(Settings(discovery="127.0.0.1:1"))
    channel = HandleChannel("echo-child", metrics=RuntimeMetrics())
    assert (await EchoStub(channel).Echo(echo())).response == "echo: hi"
    assert [replica.address for replica in channel.pool().replicas()] == [f"unix:{place}/1a2b-1"]


@pytest.mark.parametrize("transport", ["lane", "grpc"])
async def test_a_caller_that_does_not_see_the_socket_is_told_what_to_write(transport: str) -> None:
    [free] = free_ports(1)
    async with calling(ELSEWHERE, f"127.0.0.1:{free}", transport) as channel:
        with pytest.raises(NoReplica, match="not in this container; name echo-child in depends_on of this service"):
            await EchoStub(channel).Echo(echo())
        pool = channel.pool()
        await until(lambda: "not in this container" in pool.unreached().get("r1", ""), "the status says so, too")


@asynccontextmanager
async def calling(at: str, port: str, transport: str) -> AsyncIterator[HandleChannel]:
    """A handle of a service whose replica r1 has this socket and this port."""
    discovery = FakeDiscovery()
    discovery.say("echo-child", ("r1", port, False), sockets={"r1": at})
    Clients.use(Settings(discovery=f"127.0.0.1:{await discovery.listen()}", transport=transport))
    try:
        yield HandleChannel("echo-child", metrics=RuntimeMetrics())
    finally:
        await discovery.close()
