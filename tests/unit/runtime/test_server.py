"""A replica's gRPC side and its life, asked the way its callers, the controller and grpcurl ask."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, web
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pierhead import Backpressure, Broken, Settings
from pierhead.calls.clients import Clients
from pierhead.echo.v1 import echo_pb2_grpc
from pierhead.errors import SettingsError
from pierhead.replica.server import ReplicaServer

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, EchoService, address, echo, errors, generate, readyz, until
from tests.unit.runtime.pipes import Pipes, PipesStub

ECHO = "pierhead.echo.v1.Echo"


def plain(server: ReplicaServer) -> grpc.aio.Channel:
    """A channel as any other gRPC client has one."""
    return grpc.aio.insecure_channel(address(server), options=[("grpc.use_local_subchannel_pool", 1)])


class TestGrpc:
    async def test_a_full_replica_refuses_before_any_work(self, cluster: Cluster) -> None:
        service = EchoService()
        server = await cluster.start(service, max_ongoing_requests=1, replica="echo-child-1")
        async with plain(server) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            first = stub.Echo(echo("wait"))
            await until(lambda: service.begun == 1, "it is full")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Echo(echo())
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(caught.value.details()).startswith("echo-child-1 already works on 1 requests")
            trailing = dict(caught.value.trailing_metadata() or ())
            assert (trailing["pierhead-refused"], trailing["pierhead-ongoing"]) == ("overloaded", "1")
            assert service.calls == 1
            service.gate.set()
            await first
            assert ("pierhead-ongoing", "0") in tuple(await first.trailing_metadata())
        assert server.metrics.refused.values[("overloaded",)] == 1

    async def test_a_call_that_ends_at_its_deadline_is_counted_so(self, cluster: Cluster) -> None:
        service = EchoService()
        server = await cluster.start(service)
        async with plain(server) as channel:
            await channel.channel_ready()  # the deadline is the work's alone
            while not service.begun:  # a busy machine: the deadline was over before the call arrived
                with pytest.raises(grpc.aio.AioRpcError):
                    await echo_pb2_grpc.EchoStub(channel).Echo(echo("wait"), timeout=0.5)
            await until(lambda: server.readiness().ongoing == 0, "the work is cancelled")
        assert server.metrics.requests.values == {(f"{ECHO}/Echo", "DEADLINE_EXCEEDED"): 1}

    async def test_calls_side_by_side_fail_as_one_would(self, cluster: Cluster) -> None:
        """A full service behind a TaskGroup is no failure of the code that asks it."""

        class Fan(EchoService):
            async def Echo(self, request: Any, context: Any) -> Any:
                async def ask(error: Exception) -> None:
                    raise error

                mine = ValueError("boom") if request.message == "boom" else Backpressure("full, too")
                async with asyncio.TaskGroup() as calls:
                    calls.create_task(ask(Backpressure("every replica of ranker is full")))
                    calls.create_task(ask(mine))

        server = await cluster.start(Fan(), debug=True)
        async with plain(server) as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Echo(echo())
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.details() == "every replica of ranker is full"
            with pytest.raises(grpc.aio.AioRpcError, match="ExceptionGroup") as caught:
                await stub.Echo(echo("boom"))
            assert caught.value.code() is grpc.StatusCode.INTERNAL

    async def test_bytes_that_are_no_message_and_methods_that_the_service_lacks(self, cluster: Cluster) -> None:
        class Half(echo_pb2_grpc.EchoServicer):
            async def Echo(self, request: Any, context: Any) -> Any:
                raise NotImplementedError

        server = await cluster.start(Half())  # type: ignore[abstract]
        async with plain(server) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{ECHO}/Echo")(b"\xff\xff")  # type: ignore[arg-type]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [token async for token in echo_pb2_grpc.EchoStub(channel).Generate(generate())]
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_health_and_reflection(self, cluster: Cluster) -> None:
        server = await cluster.start(EchoService(), max_ongoing_requests=1)
        async with plain(server) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", ECHO):
                reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
            names = [service.name for service in (await call.read()).list_services_response.service]
        assert set(names) == {ECHO, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_a_replica_says_which_others_it_does_not_reach(
    cluster: Cluster, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pierhead.calls.replica.CONNECT_S", 0.0)
    server = await cluster.start(EchoService())
    other = f"127.0.0.1:{free_port}"
    Clients.use(Settings(static={"HALF": (other, address(server))})).pool("half", "lane")
    # Pools of other tests' loops may still be there, with services of their own.
    await until(
        lambda: server.readiness().unreached.get("half") == {other: "no connection"},
        "it says which one, and that it reaches the other",
    )


async def test_a_drain_finishes_what_is_in_flight_and_refuses_the_rest(cluster: Cluster) -> None:
    service = EchoService()
    server = await cluster.start(service)
    assert (await readyz(server))[0] == 200
    async with plain(server) as channel:
        stub = echo_pb2_grpc.EchoStub(channel)
        first = stub.Echo(echo("wait"))
        await until(lambda: service.begun == 1, "a call is in flight")
        assert (await readyz(server))[1]["ongoing"] == 1
        server.stop()
        await until(lambda: server.state == "draining", "it drains")
        status, body = await readyz(server)
        assert (status, body["state"], body["ongoing"], body["detail"]) == (503, "draining", 1, "stopped")
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=ECHO))
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Echo(echo())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata() or ())["pierhead-refused"] == "draining"
        service.gate.set()
        assert (await first).response == "echo: wait"
    await cluster.ended(server)
    assert service.calls == 1


class TestAdmin:
    async def test_metrics_name_the_service_and_the_replica(self, cluster: Cluster) -> None:
        server = await cluster.start(EchoService(), service="ranker", replica="ranker-1")
        async with plain(server) as channel:
            await echo_pb2_grpc.EchoStub(channel).Echo(echo())
        url = f"http://127.0.0.1:{server.admin_port}/metrics"
        async with ClientSession() as client, client.get(url) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            lines = (await response.text()).splitlines()
        both = 'replica="ranker-1",service="ranker"'
        assert f'pierhead_requests_total{{code="OK",method="{ECHO}/Echo",{both}}} 1.0' in lines
        assert f"pierhead_replica_ready{{{both}}} 1.0" in lines
        assert f"pierhead_ongoing_requests{{{both}}} 0.0" in lines


class Checked:
    """A part whose health a test decides."""

    def __init__(self) -> None:
        self.problem: BaseException | None = None
        self.checks = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def check_health(self) -> None:
        self.checks += 1
        await self.gate.wait()
        if self.problem is not None:
            raise self.problem


class TestHealth:
    @pytest.mark.parametrize("passes", [True, False], ids=["that passes", "that does not end before it is stopped"])
    async def test_a_replica_is_ready_only_after_its_first_check(self, cluster: Cluster, passes: bool) -> None:
        part = Checked()
        part.gate.clear()
        starting = asyncio.create_task(cluster.start(EchoService(), part))
        await until(lambda: part.checks == 1, "the check runs")
        (server,) = cluster.running
        assert server.readiness().state == "starting"
        assert (await readyz(server))[0] == 503
        part.gate.set() if passes else server.stop()
        assert (await starting).state == ("ready" if passes else "starting")
        assert (server.grpc_port is not None) is passes

    @pytest.mark.parametrize(
        ("problem", "words"),
        [
            (RuntimeError("CUDA is not there"), "CUDA is not there"),
            # Without words the process would end with code 0, as after a drain.
            (asyncio.CancelledError(), "CancelledError without being cancelled: check_health"),
        ],
    )
    async def test_a_failed_first_check_ends_it(self, cluster: Cluster, problem: BaseException, words: str) -> None:
        part = Checked()
        part.problem = problem
        with pytest.raises(RuntimeError, match=words) as caught:
            await cluster.start(EchoService(), part)
        assert "check_health" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])

    async def test_failures_take_it_out_and_one_success_brings_it_back(self, cluster: Cluster) -> None:
        part = Checked()
        server = await cluster.start(EchoService(), part, web.Application(), health_period_s=0.01)
        assert None not in (server.grpc_port, server.http_port), "one process may serve both kinds"
        part.problem = RuntimeError("the GPU fell off the bus")
        await until(lambda: server.state == "starting", "it says that it is not ready")
        status, body = await readyz(server)
        assert status == 503
        assert body["detail"].startswith("check_health failed 3 times in a row: the GPU fell off the bus")
        part.problem = None
        await until(lambda: server.state == "ready", "it is ready again")
        part.problem = Broken("the engine has ended")
        await until(lambda: server.state == "starting", "it says that it is not ready")
        status, body = await readyz(server)
        assert (status, body["detail"], body["broken"]) == (503, "the engine has ended", True)
        server.stop()
        await until(lambda: server.state == "draining", "it drains")
        assert not server.readiness().broken, "a replica that drains is not reported as broken"


class TestParts:
    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ((), "needs at least one part"),
            ((object(),), "cannot serve a object"),
            ((web.Application(), web.Application()), "takes one HTTP application, found 2"),
        ],
    )
    async def test_what_cannot_be_served_is_refused(self, parts: tuple[object, ...], message: str) -> None:
        with pytest.raises(TypeError, match=message):
            ReplicaServer(*parts)

    async def test_a_method_that_would_block_the_loop_is_refused(self, cluster: Cluster) -> None:
        class Blocking(EchoService):
            def Echo(self, request: Any, context: Any) -> Any:
                return None

        with pytest.raises(TypeError, match=r"Blocking\.Echo must be `async def`"):
            await cluster.start(Blocking())

    async def test_a_port_that_is_taken_is_named(self, cluster: Cluster) -> None:
        first = await cluster.start(EchoService())
        with pytest.raises(SettingsError, match=rf"PIERHEAD_PORT: cannot listen on 127\.0\.0\.1:{first.grpc_port}"):
            await cluster.start(EchoService(), port=first.grpc_port)
        with pytest.raises(SettingsError, match=rf"PIERHEAD_ADMIN_PORT: cannot listen on .*:{first.admin_port}"):
            await cluster.start(EchoService(), admin_port=first.admin_port)

    async def test_the_usual_admin_port_may_be_taken_where_no_controller_probes_it(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = await cluster.start(EchoService())
        monkeypatch.setattr("pierhead.replica.server.DEFAULT_ADMIN_PORT", first.admin_port)
        second = await cluster.start(EchoService(), admin_port=first.admin_port)
        assert second.admin_port not in (None, first.admin_port)
        assert f"{second.admin_port}; PIERHEAD_ADMIN_PORT sets another one" in errors(caplog, logging.WARNING)[0]
        with pytest.raises(SettingsError, match="PIERHEAD_ADMIN_PORT sets another port, 0 any free one"):
            await cluster.start(EchoService(), admin_port=first.admin_port, discovery="127.0.0.1:1")


SLOW = """
import asyncio, signal
from pierhead import serve
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
class Echo(echo_pb2_grpc.EchoServicer):
    async def Echo(self, request, context):
        if request.message == "wait":
            gate = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, gate.set)
            await gate.wait()
        return echo_pb2.EchoReply(response=request.message)
serve(Echo())
"""


class TestSignals:
    async def test_sigterm_drains_and_exits_with_0(self, cluster: Cluster, free_port: int) -> None:
        process = await cluster.process(SLOW, free_port, PIERHEAD_SERVICE="echo", PIERHEAD_ACCESS_LOG="off")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            await stub.Echo(echo())
            call = stub.Echo(echo("wait"))
            await stub.Echo(echo())  # on the same connection: when it is answered, the other one has begun
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            lines = [json.loads(await process.stderr.readline())]
            process.send_signal(signal.SIGUSR1)
            assert (await call).response == "wait"
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
        lines += [json.loads(line) for line in (await process.stderr.read()).splitlines()]
        assert [(line["message"], line["service"]) for line in lines] == [
            ("draining: 1 requests in flight", "echo"),
            ("stopped", "echo"),
        ]

    async def test_a_second_signal_stops_now(self, cluster: Cluster, free_port: int) -> None:
        process = await cluster.process(SLOW, free_port, PIERHEAD_DRAIN_TIMEOUT_S="3600")
        assert process.stderr is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            stub = echo_pb2_grpc.EchoStub(channel)
            await stub.Echo(echo())
            call = stub.Echo(echo("wait"))
            await stub.Echo(echo())  # as above
            process.send_signal(signal.SIGTERM)
            while b"draining" not in await process.stderr.readline():
                pass
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(PATIENCE_S):
                await process.wait()
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await call

    async def test_bad_settings_stop_the_start_with_2(self, cluster: Cluster, free_port: int) -> None:
        with pytest.raises(AssertionError, match=r'PIERHEAD_REQUEST_TIMEOUT_S: expected .*, found "soon"'):
            await cluster.process(SLOW, free_port, PIERHEAD_REQUEST_TIMEOUT_S="soon")
        (process,) = cluster.processes
        assert await process.wait() == 2


class Holder(EchoService):
    """Holds something that is closed at the end."""

    def __init__(self, fails: BaseException | None = None) -> None:
        super().__init__()
        self.closed: list[int] = []
        self._fails_at_end = fails

    def close(self) -> object:
        self.closed.append(self.begun - self.cancelled)
        if self._fails_at_end is not None:
            raise self._fails_at_end
        return None


class ByAsyncClose(Holder):
    async def close(self) -> None:
        super().close()


class ByAclose(Holder):
    async def aclose(self) -> None:
        super().close()


@pytest.mark.parametrize("separate", [False, True], ids=["loop", "thread"])
@pytest.mark.parametrize(
    "holder",
    [Holder(), ByAsyncClose(), ByAclose(), ByAclose(OSError("gone")), ByAclose(asyncio.CancelledError())],
    ids=["close", "async close", "aclose", "fails", "cancelled"],
)
async def test_a_servicer_is_closed_once_no_request_is_left(cluster: Cluster, separate: bool, holder: Holder) -> None:
    holder.closed.clear()
    server = await cluster.start(holder, run_user_code_in_separate_thread=separate)
    async with plain(server) as channel:
        await echo_pb2_grpc.EchoStub(channel).Echo(echo(), timeout=PATIENCE_S)
    assert holder.closed == []
    await cluster.drained(server)
    assert holder.closed == [0]


@pytest.mark.parametrize("separate", [False, True], ids=["loop", "thread"])
async def test_a_servicer_that_does_not_end_is_given_up(
    cluster: Cluster, separate: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pierhead.replica.server.END_S", 0.01)
    holder = type("Hanging", (Holder,), {"aclose": lambda _: asyncio.Event().wait()})
    await cluster.drained(await cluster.start(holder(), run_user_code_in_separate_thread=separate))
    assert "Hanging.aclose failed, or took more than 0.01 s" in caplog.text


class Twofold(EchoService, Pipes):
    """Implements two generated services."""

    def __init__(self) -> None:
        EchoService.__init__(self)
        Pipes.__init__(self)


async def test_every_generated_base_of_a_servicer_is_served(cluster: Cluster) -> None:
    server = await cluster.start(Twofold())
    async with plain(server) as channel:
        assert (await echo_pb2_grpc.EchoStub(channel).Echo(echo())).response == "echo: hi"
        assert await PipesStub(channel).One(b"hi") == b"hi"


class MuteServicer:
    """As generated by a grpcio-tools that does not register methods by name."""


def add_MuteServicer_to_server(servicer: MuteServicer, server: Any) -> None:
    server.add_generic_rpc_handlers(())


@pytest.mark.parametrize("bases", [(MuteServicer,), (EchoService, MuteServicer)])
async def test_a_servicer_without_stubs_is_refused(cluster: Cluster, bases: tuple[type[object], ...]) -> None:
    with pytest.raises(TypeError, match=r"^Mute: MuteServicer registers no methods: .*; generate its stubs again"):
        await cluster.start(type("Mute", bases, {})())
