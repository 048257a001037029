"""`local()` and `override_handle`: a servicer in the same process must not be told from one behind a real replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from pierhead import Backpressure, BadRequest, close_handles, handle
from pierhead.calls.channel import HandleChannel
from pierhead.echo.v1 import echo_pb2_grpc
from pierhead.lanes.in_memory import LocalReplica
from pierhead.local_service import local, override_handle
from pierhead.metrics import RuntimeMetrics
from pierhead.request import CURRENT, RequestContext

from tests.unit.runtime.harness import Cluster, EchoService, echo, know, until
from tests.unit.runtime.pipes import Pipes, PipesStub

# The suite of the transports, run against `pipes` of this module.
from tests.unit.runtime.test_lane_calls import TestReplies, TestUnary  # noqa: F401
from tests.unit.runtime.test_transports import TestCalls  # noqa: F401


@dataclass
class Readiness:
    ongoing: int


class Inside:
    """What the suite of the transports asks of a replica, of one without ports."""

    def __init__(self, replica: LocalReplica) -> None:
        self._admission = replica.edge.admission

    def readiness(self) -> Readiness:
        return Readiness(self._admission.ongoing)


@pytest.fixture(params=["local", "override"])
async def pipes(request: pytest.FixtureRequest) -> AsyncIterator[tuple[PipesStub, Pipes, Inside]]:
    """A stub, the servicer behind it, and its replica."""
    service = Pipes()
    if request.param == "local":
        made: list[Any] = []

        def stub(channel: Any) -> PipesStub:
            made.append(channel.replica)
            return PipesStub(channel)

        yield local(service, stub), service, Inside(made[0])
    else:
        with override_handle("pipes", service) as replica:
            yield PipesStub(HandleChannel("pipes", metrics=RuntimeMetrics())), service, Inside(replica)
    await close_handles()


Echo = tuple[Any, EchoService]
"""A stub, and the servicer behind it."""


@pytest.fixture(params=["local", "override", "replica"])
async def served(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[Echo]:
    """An echo in this process, and one behind a real replica."""
    service = EchoService()
    if request.param == "replica":
        know(await cluster.start(service, max_ongoing_requests=2))
        yield (handle(echo_pb2_grpc.EchoStub, "echo-child"), service)
    elif request.param == "local":
        yield (local(service, echo_pb2_grpc.EchoStub, max_ongoing_requests=2), service)
    else:
        with override_handle("echo-child", service, max_ongoing_requests=2):
            yield (handle(echo_pb2_grpc.EchoStub, "echo-child"), service)


class TestSameAsAReplica:
    async def test_the_service_s_own_error(self, served: Echo) -> None:
        with pytest.raises(BadRequest, match='message: expected anything but "bad"'):
            await served[0].Echo(echo("bad"))

    async def test_the_request_context(self, served: Echo) -> None:
        deadline, traceparent = time.monotonic() + 30, f"00-{'a' * 32}-{'b' * 16}-01"
        CURRENT.set(RequestContext("r-1", deadline, traceparent, "s-1", "m-1"))
        await served[0].Echo(echo())
        (seen,) = served[1].seen
        assert seen is not None
        assert (seen.request_id, seen.session_id, seen.model_id) == ("r-1", "s-1", "m-1")
        assert seen.trace is not None
        assert (seen.trace.trace_id, seen.trace.parent_id, seen.trace.sampled) == ("a" * 32, "b" * 16, True)
        assert seen.traceparent == seen.trace.traceparent()
        assert abs(seen.deadline - deadline) < 15

    async def test_admission(self, served: Echo) -> None:
        calls = [served[0].Echo(echo("wait")) for _ in range(2)]
        await until(lambda: served[1].begun == 2, "it is full")
        with pytest.raises(Backpressure, match=r"is full|already works on 2 requests"):  # "already works": out of time
            await served[0].Echo(echo(), timeout=0.2)
        served[1].gate.set()
        await asyncio.gather(*calls)
        assert (await served[0].Echo(echo("hi"))).response == "echo: hi"


WHO: ContextVar[str] = ContextVar("who", default="nobody")


class TestLocal:
    async def test_a_servicer_sees_none_of_its_caller_s_variables(self) -> None:
        seen = []

        class Service(EchoService):
            async def Echo(self, request: Any, context: Any) -> Any:
                seen.append((WHO.get(), context.peer()))
                return await super().Echo(request, context)

        WHO.set("the caller")
        await local(Service(), echo_pb2_grpc.EchoStub).Echo(echo())
        assert seen == [("nobody", "local")]

    async def test_a_servicer_gets_a_message_of_its_own(self) -> None:
        class Service(EchoService):
            async def Echo(self, request: Any, context: Any) -> Any:
                request.message = "changed"
                return await super().Echo(request, context)

        request = echo("hi")
        reply = await local(Service(), echo_pb2_grpc.EchoStub).Echo(request)
        assert (reply.response, request.message) == ("echo: changed", "hi")

    def test_a_stub_outlives_its_event_loop(self) -> None:
        stub = local(EchoService(), echo_pb2_grpc.EchoStub)

        async def call() -> str:
            return (await stub.Echo(echo("hi"))).response

        assert [asyncio.run(call()) for _ in range(2)] == ["echo: hi"] * 2

    async def test_after_close_handles_it_starts_afresh_and_nothing_is_left(self) -> None:
        stub = local(EchoService(), echo_pb2_grpc.EchoStub)
        for _ in range(2):
            assert (await stub.Echo(echo("hi"))).response == "echo: hi"
            await close_handles()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    async def test_a_call_that_is_cut_off_by_the_end_says_so(self) -> None:
        service = EchoService()
        stub = local(service, echo_pb2_grpc.EchoStub)
        call = stub.Echo(echo("wait"))
        await until(lambda: service.begun == 1, "it has begun")
        await close_handles()
        with pytest.raises(grpc.RpcError, match="it went away after it may have begun"):
            await call
        assert service.cancelled == 1

    def test_what_is_no_servicer_is_refused(self) -> None:
        with pytest.raises(TypeError, match="object does not inherit from a generated"):
            local(object(), echo_pb2_grpc.EchoStub)


class TestOverride:
    async def test_calls_of_a_handle_made_before_go_there_and_back(self, cluster: Cluster) -> None:
        know(await cluster.start(EchoService("real")))
        stub = handle(echo_pb2_grpc.EchoStub, "echo-child")
        replies = [(await stub.Echo(echo())).response]
        with override_handle("echo-child", EchoService("fake")):
            replies.append((await stub.Echo(echo())).response)
            with override_handle("echo-child", EchoService("inner")):
                replies.append((await stub.Echo(echo())).response)
            replies.append((await stub.Echo(echo())).response)
        replies.append((await stub.Echo(echo())).response)
        assert replies == ["real: hi", "fake: hi", "inner: hi", "fake: hi", "real: hi"]

    def test_it_holds_in_every_event_loop(self) -> None:
        stub = handle(echo_pb2_grpc.EchoStub, "echo-child")

        async def call() -> str:
            return (await stub.Echo(echo("hi"))).response

        with override_handle("echo-child", EchoService("fake")) as replica:
            assert [asyncio.run(call()) for _ in range(2)] == ["fake: hi"] * 2
        assert replica.metrics.requests.values["pierhead.echo.v1.Echo/Echo", "OK"] == 2

    async def test_calls_in_flight_end_where_they_began(self) -> None:
        service = EchoService("fake")
        stub = handle(echo_pb2_grpc.EchoStub, "echo-child")
        with override_handle("echo-child", service):
            call = stub.Echo(echo("wait"))
            await until(lambda: service.begun == 1, "it has begun")
        service.gate.set()
        assert (await call).response == "fake: wait"
