"""What callers outside the stack learn of a failure, and how long they may keep a place."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, web
from fastapi import FastAPI
from pierhead import DeadlineExceeded, handle
from pierhead.echo.v1.echo_pb2 import Token
from pierhead.echo.v1.echo_pb2_grpc import EchoServicer, EchoStub, add_EchoServicer_to_server
from pierhead.errors import SettingsError
from pierhead.replica.server import ReplicaServer

from tests.unit.runtime.harness import Cluster, EchoService, address, echo, generate, know, until

SECRET = "password=hunter2"

child = handle(EchoStub, "echo-child")


class Leaky(EchoServicer):
    """Fails with a secret in the way that the message names."""

    async def Echo(self, request: Any, context: Any) -> Any:
        match request.message:
            case "unsendable":
                return SECRET
            case "settings":
                raise SettingsError(f"DATABASE: expected a URL, found {SECRET}")
        raise ValueError(SECRET)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield Token(text="one")
        if request.message == "unsendable":
            yield SECRET
        raise ValueError(SECRET)


class Foreign(EchoServicer):
    """On a gRPC server that is not ours, which tells callers what its exceptions say."""

    async def Echo(self, request: Any, context: Any) -> Any:
        raise ValueError(SECRET)


def assert_id_of_log(text: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """`text` is an id and nothing else; the log has the failure under it."""
    found = re.fullmatch(r"internal error \[error id (\w{16})\]", text or "")
    assert found, text
    (record,) = [record for record in caplog.records if f"[error id {found[1]}]" in record.getMessage()]
    assert record.exc_info


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """What a call over plain gRPC ends with, without the secret anywhere."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call if hasattr(call, "__aiter__") else _one(call):
            pass
    assert SECRET not in str(caught.value.trailing_metadata())
    return caught.value


async def _one(call: Any) -> AsyncIterator[Any]:
    yield await call


class TestWhatIsLearnt:
    @pytest.mark.parametrize("message", ["raise", "unsendable", "settings"])
    @pytest.mark.parametrize("method", ["Echo", "Generate"])
    async def test_plain_grpc(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture, method: str, message: str
    ) -> None:
        server = await cluster.start(Leaky())
        async with grpc.aio.insecure_channel(address(server)) as channel:
            stub = EchoStub(channel)
            call = stub.Echo(echo(message)) if method == "Echo" else stub.Generate(generate(message))
            error = await refused(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert_id_of_log(error.details(), caplog)

    async def test_plain_grpc_with_debug(self, cluster: Cluster) -> None:
        server = await cluster.start(Leaky(), debug=True)
        async with grpc.aio.insecure_channel(address(server)) as channel:
            details = (await refused(EchoStub(channel).Echo(echo()))).details() or ""
        assert details.startswith(f"ValueError: {SECRET} [error id ")
        assert "Traceback" in details

    @pytest.mark.parametrize("kind", ["aiohttp", "asgi"])
    @pytest.mark.parametrize("where", ["own", "child", "foreign"])
    async def test_http(self, cluster: Cluster, caplog: pytest.LogCaptureFixture, kind: str, where: str) -> None:
        """Its own exception, that of a callee, and what a server that is not ours says of one of its own."""
        know(await cluster.start(Leaky()))

        async def handler(_: Any = None) -> None:
            if where == "child":
                await child.Echo(echo())
            if where == "foreign":
                await foreign_call()
            raise ValueError(SECRET)

        app: Any = web.Application() if kind == "aiohttp" else FastAPI()
        if kind == "aiohttp":
            app.router.add_get("/", handler)
        else:
            app.add_api_route("/", handler)
        error = await http_error(await cluster.start(app))
        assert error.keys() == {"code", "message", "request_id"}
        assert error["code"] == "internal"
        assert_id_of_log(error["message"], caplog)


async def foreign_call() -> None:
    server = grpc.aio.server()
    add_EchoServicer_to_server(Foreign(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await EchoStub(channel).Echo(echo())
    finally:
        await server.stop(0)


async def http_error(server: ReplicaServer) -> dict[str, str]:
    async with ClientSession() as client, client.get(f"http://127.0.0.1:{server.http_port}/") as response:
        assert response.status == 500
        told: dict[str, str] = (await response.json())["error"]
        return told


class Endless(EchoService):
    """Streams more than fits any buffer."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Token]:
        self.begun += 1
        while True:
            yield Token(text="x" * 60_000)


class TestHowLong:
    """A caller may ask for less time than `request_timeout_s`, and not for more."""

    @pytest.mark.parametrize("timeout", [None, 86_400])
    async def test_plain_grpc(self, cluster: Cluster, timeout: float | None) -> None:
        service = EchoService()
        server = await cluster.start(service, request_timeout_s=0.3)
        async with grpc.aio.insecure_channel(address(server)) as channel:
            error = await refused(EchoStub(channel).Echo(echo("wait"), timeout=timeout))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "was not done within 0.3 s, the longest that this service works on a call" in str(error.details())
        assert service.cancelled == 1
        assert service.seen[0] is not None
        assert service.seen[0].remaining_s() <= 0, "calls made within it have no more time than it"
        await until(lambda: server.readiness().ongoing == 0, "its place is free")

    async def test_a_reply_that_is_not_read(self, cluster: Cluster) -> None:
        service = Endless()
        server = await cluster.start(service, request_timeout_s=0.3)
        async with grpc.aio.insecure_channel(address(server)) as channel:
            calls = [EchoStub(channel).Generate(generate(), timeout=86_400) for _ in range(3)]
            await until(lambda: service.begun == 3, "all have begun")
            await until(lambda: server.readiness().ongoing == 0, "their places are free")
            for call in calls:
                call.cancel()

    async def test_lanes(self, cluster: Cluster) -> None:
        service = EchoService()
        server = await cluster.start(service, request_timeout_s=0.3)
        know(server)
        with pytest.raises(DeadlineExceeded, match=r"was not done within 0\.3 s, the longest that this service works"):
            await child.Echo(echo("wait"), timeout=86_400)
        assert service.cancelled == 1
        assert server.readiness().ongoing == 0
