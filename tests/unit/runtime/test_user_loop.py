"""User code in a thread of its own: everything that holds for a servicer holds there, and what blocks stops nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from aiohttp import web
from pierhead import Settings, current_request, handle
from pierhead.calls.channel import HandleChannel
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
from pierhead.errors import DeadlineExceeded, SettingsError, Unavailable
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.server import ReplicaServer
from pierhead.replica.thread.user_loop import UserLoop
from pierhead.request import CURRENT, RequestContext

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, EchoService, address, echo, know, readyz, until
from tests.unit.runtime.pipes import Pipes, PipesStub, serve

# Collected here once more: with the `pipes` below, each of them runs with the servicer in a thread.
from tests.unit.runtime.test_lane_calls import test_a_thousand_calls_at_once  # noqa: F401
from tests.unit.runtime.test_transports import TestCalls  # noqa: F401


class Gate(asyncio.Event):
    """An event that the test's thread may set for code in the other one."""

    def set(self) -> None:
        super().set()
        loop = getattr(self, "_loop", None)
        if loop is not None:
            loop.call_soon_threadsafe(lambda: None)  # wakes it up


@pytest.fixture
async def pipes(cluster: Cluster) -> tuple[PipesStub, Pipes, ReplicaServer]:
    service = Pipes()
    service.gate = Gate()
    service.gate.set()
    server = await cluster.start(
        service, run_user_code_in_separate_thread=True, debug=True, max_ongoing_requests=10_000
    )
    know(server)
    return PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics())), service, server


class Threaded(EchoService):
    """Does what a message says, and remembers where."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.began = threading.Event()
        self.release = threading.Event()
        self.health: Exception | None = None
        self.checks = 0

    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        self.threads.add(threading.get_ident())
        self.began.set()
        match request.message:
            case "block":
                self.release.wait()
            case "who":
                request_ = current_request()
                assert request_ is not None
                return echo_pb2.EchoReply(response=f"{request_.request_id} {request_.remaining_s() < 5}")
            case "exit":
                raise SystemExit(3)
            case "onward":
                return await self.onward(request)
        return echo_pb2.EchoReply(response=request.message)

    async def check_health(self) -> None:
        self.checks += 1
        self.threads.add(threading.get_ident())
        if self.health is not None:
            raise self.health

    async def onward(self, request: echo_pb2.EchoRequest) -> echo_pb2.EchoReply:
        raise NotImplementedError


@pytest.fixture
async def served(cluster: Cluster) -> AsyncIterator[tuple[echo_pb2_grpc.EchoAsyncStub, Threaded, ReplicaServer]]:
    service = Threaded()
    server = await cluster.start(
        service, run_user_code_in_separate_thread=True, max_ongoing_requests=2, health_period_s=0.01, debug=True
    )
    know(server)
    yield handle(echo_pb2_grpc.EchoStub, "echo-child", timeout_s=PATIENCE_S), service, server
    service.release.set()


Served = tuple[Any, Threaded, ReplicaServer]


async def test_methods_and_checks_run_in_one_other_thread(served: Served) -> None:
    stub, service, server = served
    await stub.Echo(echo())
    await until(lambda: service.checks > 2, "checks run")
    (thread,) = service.threads
    assert thread != threading.get_ident()
    assert server.state == "ready"
    service.health = RuntimeError("the GPU fell off the bus")
    await until(lambda: server.state == "starting", "it is ill")


async def test_code_that_blocks_stops_neither_refusals_nor_health_answers(served: Served) -> None:
    stub, service, server = served
    calls = [asyncio.ensure_future(stub.Echo(echo("block"))) for _ in range(2)]
    await until(service.began.is_set, "user code blocks its loop")
    await until(lambda: server.readiness().ongoing == 2, "both calls have come")
    assert (await readyz(server))[1]["ongoing"] == 2
    async with grpc.aio.insecure_channel(address(server)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await echo_pb2_grpc.EchoStub(channel).Echo(echo())
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("pierhead-ongoing", "2") in tuple(refused.value.trailing_metadata() or ())
    assert not any(call.done() for call in calls)
    service.release.set()
    assert [reply.response for reply in await asyncio.gather(*calls)] == ["block", "block"]


async def test_work_that_blocks_past_its_deadline_still_counts(served: Served) -> None:
    stub, service, server = served
    await stub.Echo(echo())  # connected: the deadline is the work's alone
    service.began.clear()
    while not service.began.is_set():  # a busy machine: the deadline was over before the call arrived
        with pytest.raises(DeadlineExceeded):
            await stub.Echo(echo("block"), timeout=0.5)
    assert server.readiness().ongoing == 1, "it continues without a waiting caller"
    service.release.set()
    await until(lambda: server.readiness().ongoing == 0, "until it ends")


async def test_the_request_is_known_there(served: Served) -> None:
    stub, _, _ = served
    CURRENT.set(RequestContext("r-1", time.monotonic() + 4))
    reply = await stub.Echo(echo("who"))
    assert reply.response == "r-1 True"


async def test_handles_work_there(cluster: Cluster) -> None:
    behind = await cluster.start(Threaded())
    where = {"ECHO_CHILD": (address(behind),)}
    front = Threaded()
    server = await cluster.start(front, run_user_code_in_separate_thread=True, service="front", static=where)
    onward = handle(echo_pb2_grpc.EchoStub, "echo-child", timeout_s=PATIENCE_S)

    async def call(request: echo_pb2.EchoRequest) -> echo_pb2.EchoReply:
        found: echo_pb2.EchoReply = await onward.Echo(echo("behind"))
        return found

    front.onward = call  # type: ignore[method-assign]
    async with grpc.aio.insecure_channel(address(server)) as channel:
        reply = await echo_pb2_grpc.EchoStub(channel).Echo(echo("onward"))
    assert reply.response == "behind"
    await cluster.drained(server)
    assert not [
        thread for thread in threading.enumerate() if thread.name == "pierhead-user" and thread.ident in front.threads
    ]


class Writes(Pipes):
    """Split writes its replies by itself."""

    async def Split(self, request: bytes, context: Any) -> None:  # type: ignore[override]
        async for message in super().Split(request, context):
            await context.write(message)


@pytest.mark.parametrize("transport", ["lane", "grpc"])
async def test_a_method_may_write_its_replies_there(cluster: Cluster, transport: str) -> None:
    stub, _, _ = await serve(cluster, Writes(), transport=transport, run_user_code_in_separate_thread=True)
    assert [int.from_bytes(reply[:4], "big") async for reply in stub.Split(b"2000 100")] == list(range(2000))


async def test_code_that_never_ends_is_left_behind(
    cluster: Cluster, served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pierhead.replica.thread.user_loop.END_S", 0.05)
    stub, service, server = served
    call = asyncio.ensure_future(stub.Echo(echo("block")))
    await until(service.began.is_set, "it runs")
    server.stop()
    server.stop()
    with pytest.raises((Unavailable, grpc.RpcError)):
        await call
    await cluster.ended(server)
    assert "user code has not ended 0.05 s after it was cancelled and is left behind" in caplog.text
    assert "self.release.wait()" in caplog.text, "where it is"
    service.release.set()
    (thread,) = service.threads
    await until(lambda: thread not in {one.ident for one in threading.enumerate()}, "the thread ends after all")


async def test_user_code_that_ends_its_thread_ends_the_replica(cluster: Cluster, served: Served) -> None:
    stub, _, server = served
    call = asyncio.ensure_future(stub.Echo(echo("exit")))
    with pytest.raises(RuntimeError, match=r"user code has ended its thread with SystemExit\(3\)"):
        await cluster.ended(server)
    with pytest.raises((Unavailable, grpc.RpcError)):
        await call


async def test_an_http_application_is_refused(cluster: Cluster) -> None:
    with pytest.raises(SettingsError, match=r"_IN_SEPARATE_THREAD: expected false .* asyncio.to_thread"):
        await cluster.start(web.Application(), run_user_code_in_separate_thread=True)


async def test_nothing_runs_on_a_loop_that_was_closed() -> None:
    async def there() -> int:
        return threading.get_ident()

    loop = UserLoop(Settings())
    await loop.start()
    assert await loop.run(there) != threading.get_ident()
    await loop.close()
    with pytest.raises(Unavailable):
        await loop.run(there)
    await loop.lives()
