"""Calls through a handle to real replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from pierhead import (
    Backpressure,
    DeadlineExceeded,
    NoReplica,
    PayloadTooLarge,
    ReplicaDied,
    ScaledToZero,
    Settings,
    close_handles,
    handle,
)
from pierhead.calls import directory as directories
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.calls.directory import Directory, resolve
from pierhead.calls.listing import Listing
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.metrics import RuntimeMetrics

from tests.harness.machine import Pace, judge
from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import (
    Cluster,
    EchoService,
    FakeDiscovery,
    address,
    echo,
    know,
    until,
)
from tests.unit.runtime.pipes import Pipes, PipesStub

DEFINED_AT_IMPORT = handle(EchoStub, "echo-child")


def make(**options: Any) -> tuple[Any, HandleChannel]:
    channel = HandleChannel("echo-child", metrics=RuntimeMetrics(), **options)
    return EchoStub(channel), channel


def connected(channel: HandleChannel) -> int:
    """How many replicas may be called now."""
    return sum(replica.callable for replica in channel.pool().replicas())


@pytest.fixture
async def discovery(cluster: Cluster) -> AsyncIterator[FakeDiscovery]:
    """A controller that the handles of the test know."""
    made = FakeDiscovery()
    Clients.use(Settings(discovery=f"127.0.0.1:{await made.listen()}"))
    yield made
    await made.close()


async def test_a_handle_made_at_import_works_in_any_loop(cluster: Cluster) -> None:
    know(await cluster.start(EchoService()))
    reply = await DEFINED_AT_IMPORT.Echo(echo())
    assert reply.response == "echo: hi"


async def test_a_channel_is_ready_once_a_replica_may_be_called(cluster: Cluster) -> None:
    know(await cluster.start(EchoService()))
    _, channel = make()
    assert channel.get_state() is grpc.ChannelConnectivity.CONNECTING
    async with asyncio.timeout(PATIENCE_S):
        await channel.channel_ready()
    assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_a_handle_works_in_several_threads_at_once(cluster: Cluster) -> None:
    """Each has its own loop, line, and policy object; a call that waits in one is no business of the other."""
    server = await cluster.start(EchoService(), max_ongoing_requests=1)
    know(server)
    stub, channel = make(policy="round_robin", max_queued_requests=30)

    async def calls() -> list[str]:
        return await asyncio.gather(*[_reply(stub, f"{number}") for number in range(30)])

    async def elsewhere() -> list[str]:
        know(server)
        try:
            return await calls()
        finally:
            await close_handles()

    here, there = await asyncio.gather(calls(), asyncio.to_thread(asyncio.run, elsewhere()))
    assert here == there == [f"echo: {number}" for number in range(30)]
    assert channel.queued == 0


class TestDeadlines:
    async def test_a_call_ends_at_its_timeout_and_so_does_the_work(self, cluster: Cluster) -> None:
        service = EchoService()
        know(await cluster.start(service))
        stub, _ = make()
        await stub.Echo(echo())  # connected: the deadline is the work's alone
        with pytest.raises(DeadlineExceeded, match=r"echo-child replica .*: no reply within 0\.5 s"):
            await stub.Echo(echo("wait"), timeout=0.5)
        await until(lambda: service.cancelled == 1, "the work at the replica is cancelled")

    async def test_every_call_has_a_deadline(self, cluster: Cluster) -> None:
        service = EchoService()
        know(await cluster.start(service), request_timeout_s=7.0)
        await make()[0].Echo(echo())
        (seen,) = service.seen
        assert seen is not None
        assert 5 < seen.deadline - time.monotonic() <= 7.01  # gRPC's wire has whole milliseconds, rounded up


class TestRefusals:
    async def test_a_caller_learns_a_limit_that_nobody_told_it(self, cluster: Cluster, pace: Pace) -> None:
        server = await cluster.start(EchoService(), max_ongoing_requests=4)
        know(server)
        stub, _ = make()
        started = time.monotonic()
        await asyncio.gather(*[_reply(stub, "hi") for _ in range(300)])
        assert server.metrics.refused.values.get(("overloaded",), 0) < 310, "not one refusal more per round"
        first_round = server.metrics.refused.values.get(("overloaded",), 0)
        await asyncio.gather(*[_reply(stub, "hi") for _ in range(300)])
        assert server.metrics.refused.values.get(("overloaded",), 0) == first_round, "it knows now"
        took_s = time.monotonic() - started
        judge(took_s < 5, f"600 calls do not wait for each other's refusals, and it was {took_s:.1f} s", pace)

    async def test_a_message_too_large_for_grpc_is_the_caller_s_fault(self, cluster: Cluster) -> None:
        know(await cluster.start(EchoService()))
        with pytest.raises(PayloadTooLarge, match="larger than max"):
            await make()[0].Echo(echo("x" * (64 * 1024 * 1024)))


class TestNobodyComes:
    """Calls that no replica will ever answer do not wait for one."""

    async def test_one_to_a_service_that_a_person_has_set_to_zero_fails_at_once(
        self, cluster: Cluster, discovery: FakeDiscovery
    ) -> None:
        discovery.say("echo-child")
        stub, channel = make()
        waiting = asyncio.ensure_future(_awaited(stub.Echo(echo(), timeout=600)))
        await until(lambda: channel.queued == 1, "the call waits")
        discovery.say("echo-child", scaled_to_zero_by="`make scale`")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ScaledToZero, match=r"echo-child is scaled to 0 replicas \(by `make scale`\)"):
                await waiting
            with pytest.raises(NoReplica, match="`make scale SERVICE=echo-child N=1` does"):
                await stub.Echo(echo(), timeout=600)
        discovery.say("echo-child")
        await until(lambda: channel.pool().listing.absence is None, "it is heard that it is back")
        await _assert_waits_for_the_first(stub, channel, discovery, cluster)

    async def test_one_to_a_service_that_the_controller_does_not_know_fails_soon(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, discovery: FakeDiscovery
    ) -> None:
        monkeypatch.setattr(directories, "UNKNOWN_GRACE_S", 0.2)
        stub, channel = make()
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(2):
                with pytest.raises(NoReplica, match="the controller knows no service of that name") as caught:
                    await stub.Echo(echo(), timeout=600)
                assert "`pierhead status`" in str(caught.value)
        discovery.say("echo-child")
        await until(lambda: channel.pool().listing.absence is None, "it is there by now")
        await _assert_waits_for_the_first(stub, channel, discovery, cluster)

    async def test_one_that_the_controller_knows_no_more_is_called_while_it_is_there(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, discovery: FakeDiscovery
    ) -> None:
        monkeypatch.setattr(directories, "UNKNOWN_GRACE_S", 0.0)
        server = await cluster.start(EchoService())
        discovery.say("echo-child", ("r1", address(server), False))
        stub, channel = make()
        await _reply(stub, "hi")
        discovery.forget("echo-child")
        await until(lambda: channel.pool().listing.absence is not None, "it is heard that it is not known any more")
        await _reply(stub, "hi")
        await cluster.drained(server)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(NoReplica, match="the controller knows no service of that name"):
                await stub.Echo(echo(), timeout=600)

    async def test_one_that_only_dns_knows_is_waited_for(
        self, free_port: int, monkeypatch: pytest.MonkeyPatch, discovery: FakeDiscovery
    ) -> None:
        monkeypatch.setattr(directories, "UNKNOWN_GRACE_S", 0.0)
        channel = HandleChannel(f"localhost:{free_port}", metrics=RuntimeMetrics())
        pool = channel.pool()
        await until(lambda: bool(pool.replicas()) and discovery.watches > 0, "both have answered")
        with pytest.raises(NoReplica, match="is not connected; none had room within"):
            await EchoStub(channel).Echo(echo(), timeout=0.3)


async def _awaited(call: Any) -> Any:
    return await call


async def _assert_waits_for_the_first(
    stub: Any, channel: HandleChannel, discovery: FakeDiscovery, cluster: Cluster
) -> None:
    """Who calls now waits for the service's first replica, and has its answer."""
    waiting = asyncio.ensure_future(_reply(stub, "hi"))
    await until(lambda: channel.queued == 1, "who calls waits for its first replica")
    discovery.say("echo-child", ("r1", address(await cluster.start(EchoService())), False))
    assert await waiting == "echo: hi"


async def _reply(stub: Any, message: str) -> str:
    reply = await stub.Echo(echo(message))
    return str(reply.response)


class TestDrain:
    async def test_no_caller_sees_a_drain(self, cluster: Cluster) -> None:
        services = [EchoService(str(number)) for number in range(3)]
        servers = [await cluster.start(service) for service in services]
        know(*servers)
        stub, _ = make()
        errors: list[Exception] = []
        done = 0
        stop = False

        async def caller() -> None:
            nonlocal done
            while not stop:
                try:
                    await stub.Echo(echo(), timeout=PATIENCE_S)
                    done += 1
                except Exception as error:
                    errors.append(error)

        callers = [asyncio.create_task(caller()) for _ in range(16)]
        await until(lambda: all(service.calls > 20 for service in services), "all three work")
        await cluster.drained(servers[0])
        await cluster.drained(servers[1])
        before = done
        await until(lambda: done > before + 50, "the last one carries on")
        stop = True
        await asyncio.gather(*callers)
        assert errors == []

    async def test_what_is_in_flight_finishes(self, cluster: Cluster) -> None:
        old, new = EchoService("old"), EchoService("new")
        servers = [await cluster.start(old), await cluster.start(new)]
        know(servers[0])
        stub, _ = make()
        waiting = asyncio.ensure_future(_reply(stub, "wait"))
        await until(lambda: old.begun == 1, "a call is in flight")
        servers[0].stop()
        await until(lambda: servers[0].state == "draining", "it drains")
        with pytest.raises(NoReplica, match="is draining"):
            await stub.Echo(echo(), timeout=0.2)
        assert old.calls == 1, "refused before any work"
        old.gate.set()
        assert await waiting == "old: wait"
        await cluster.ended(servers[0])

    async def test_a_replica_that_the_controller_drains_gets_no_new_calls(
        self, cluster: Cluster, discovery: FakeDiscovery
    ) -> None:
        one, two = EchoService("one"), EchoService("two")
        servers = [await cluster.start(one), await cluster.start(two)]
        discovery.say("echo-child", ("r1", address(servers[0]), False), ("r2", address(servers[1]), False))
        stub, channel = make()
        await stub.Echo(echo())
        await until(lambda: connected(channel) == 2, "both are connected")
        discovery.say("echo-child", ("r1", address(servers[0]), True), ("r2", address(servers[1]), False))
        await until(lambda: connected(channel) == 1, "the news arrived")
        calls = one.calls
        assert {await _reply(stub, "hi") for _ in range(20)} == {"two: hi"}
        assert one.calls == calls


REPLICA = """
import asyncio, sys
from pierhead import serve
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
class Echo(echo_pb2_grpc.EchoServicer):
    async def Echo(self, request, context):
        if request.message == "wait":
            print("it waits", file=sys.stderr, flush=True)
            await asyncio.sleep(60)
        return echo_pb2.EchoReply(response="process: " + request.message)
serve(Echo())
"""


async def said(process: asyncio.subprocess.Process, words: str) -> None:
    """Wait until a process has written that line."""
    assert process.stderr is not None
    async with asyncio.timeout(20):
        while words not in (line := (await process.stderr.readline()).decode()):
            assert line, f"it ended before it said {words!r}"


class TestDeath:
    async def test_only_what_a_killed_replica_had_begun_fails(self, cluster: Cluster, free_port: int) -> None:
        process = await cluster.process(REPLICA, free_port)
        other = EchoService("other")
        server = await cluster.start(other)
        Clients.use(Settings(static={"ECHO_CHILD": (address(server), f"127.0.0.1:{free_port}")}))
        stub, channel = make(policy="round_robin")
        await until(lambda: connected(channel) == 2, "both are connected")
        begun = [asyncio.ensure_future(_reply(stub, "wait")) for _ in range(4)]
        await until(lambda: other.begun == 2, "two calls each")
        for _ in range(2):  # what is still on its way there has not begun, and may go elsewhere
            await said(process, "it waits")
        process.kill()
        await until(lambda: sum(call.done() for call in begun) >= 2, "those that it had begun have ended")
        ended = [call for call in begun if call.done()]
        errors = await asyncio.gather(*ended, return_exceptions=True)
        assert len(errors) == 2
        assert all(isinstance(error, ReplicaDied) for error in errors)
        assert f"127.0.0.1:{free_port}: it went away after it may have begun" in str(errors[0])
        replies = [await _reply(stub, "hi") for _ in range(20)]
        assert replies == ["other: hi"] * 20
        other.gate.set()
        assert [await call for call in begun if call not in ended] == ["other: wait"] * 2

    async def test_a_replica_that_comes_back_is_used_again(self, cluster: Cluster, free_port: int) -> None:
        process = await cluster.process(REPLICA, free_port)
        Clients.use(Settings(static={"ECHO_CHILD": (f"127.0.0.1:{free_port}",)}))
        stub, channel = make()
        assert await _reply(stub, "hi") == "process: hi"
        process.kill()
        await until(lambda: not channel.pool().has_callable, "its death is noticed")
        call = asyncio.ensure_future(_reply(stub, "again"))
        await cluster.process(REPLICA, free_port)
        assert await call == "process: again"

    async def test_a_hanging_replica_is_noticed_within_seconds(
        self, cluster: Cluster, free_port: int, pace: Pace
    ) -> None:
        process = await cluster.process(REPLICA, free_port)
        Clients.use(Settings(static={"ECHO_CHILD": (f"127.0.0.1:{free_port}",)}))
        stub, _ = make()
        await _reply(stub, "hi")
        process.send_signal(19)  # SIGSTOP
        started = time.monotonic()
        with pytest.raises(ReplicaDied):
            await stub.Echo(echo(), timeout=30)
        took_s = time.monotonic() - started
        judge(took_s < 8, f"noticed within seconds, and it was {took_s:.1f} s", pace)


class TestDiscovery:
    async def test_a_caller_that_loses_the_controller_keeps_its_last_list(self, cluster: Cluster) -> None:
        server = await cluster.start(EchoService())
        discovery = FakeDiscovery()
        port = await discovery.listen()
        discovery.say("echo-child", ("r1", address(server), False))
        Clients.use(Settings(discovery=f"127.0.0.1:{port}"))
        stub, channel = make()
        await _reply(stub, "hi")
        await discovery.close()
        for _ in range(20):
            await _reply(stub, "hi")
        successor = FakeDiscovery()
        successor.say("echo-child", ("r2", address(server), False))
        await successor.listen(port)
        await until(lambda: [r.name for r in channel.pool().replicas()] == ["r2"], "the next controller is heard")
        await successor.close()

    async def test_a_controller_that_does_not_know_the_service_yet_takes_no_list_away(self, cluster: Cluster) -> None:
        server = await cluster.start(EchoService())
        discovery = FakeDiscovery()
        port = await discovery.listen()
        discovery.say("echo-child", ("r1", address(server), False))
        Clients.use(Settings(discovery=f"127.0.0.1:{port}"))
        stub, channel = make()
        await _reply(stub, "hi")
        await discovery.close()
        ignorant = FakeDiscovery()
        await ignorant.listen(port)
        await until(lambda: ignorant.watches > 0, "the next controller is asked")
        await _reply(stub, "hi")
        assert [replica.name for replica in channel.pool().replicas()] == ["r1"]
        await ignorant.close()

    async def test_a_list_that_cannot_be_taken_over_does_not_end_the_watch(self) -> None:
        discovery = FakeDiscovery()
        discovery.say("echo-child", ("r1", "10.0.0.1:1", False))
        directory = Directory(Settings(discovery=f"127.0.0.1:{await discovery.listen()}"))
        heard: list[str] = []

        def update(listing: Listing) -> None:
            heard.extend(endpoint.name for endpoint in listing.endpoints)
            if len(heard) == 1:
                raise RuntimeError("a defect")

        directory.add("echo-child", update)
        await until(lambda: len(heard) >= 2, "the list is told again")
        await directory.close()
        await discovery.close()

    async def test_one_stream_carries_all_services(self, cluster: Cluster, discovery: FakeDiscovery) -> None:
        server = await cluster.start(EchoService())
        discovery.say("echo-child", ("r1", address(server), False))
        discovery.say("second", ("r2", address(server), False))
        await make()[0].Echo(echo())
        second = EchoStub(HandleChannel("second", metrics=RuntimeMetrics()))
        await second.Echo(echo())
        assert discovery.asked[-1] == ["echo-child", "second"]

    @pytest.mark.parametrize("host", ["a..b", "x" * 64])
    async def test_a_name_that_no_host_has_stands_for_nothing(self, host: str) -> None:
        assert await resolve(host, 9000) == []

    async def test_dns_stands_in_until_the_controller_answers(self, cluster: Cluster) -> None:
        server = await cluster.start(EchoService())
        Clients.use(Settings(discovery="127.0.0.1:1"))
        stub = EchoStub(HandleChannel(f"localhost:{server.grpc_port}", metrics=RuntimeMetrics()))
        reply = await stub.Echo(echo(), timeout=PATIENCE_S)
        assert reply.response == "echo: hi"

    async def test_the_service_s_own_bound_for_its_lines_is_obeyed(self, cluster: Cluster) -> None:
        service = EchoService()
        server = await cluster.start(service)
        discovery = FakeDiscovery()
        discovery.say("echo-child", ("r1", address(server), False), limit=1, max_queued=1)
        Clients.use(Settings(discovery=f"127.0.0.1:{await discovery.listen()}", max_queued_requests=0))
        stub, channel = make()
        await channel.channel_ready()
        calls = [asyncio.ensure_future(_reply(stub, "wait")) for _ in range(2)]
        await until(lambda: service.begun == 1 and channel.queued == 1, "one works, one waits")
        with pytest.raises(Backpressure, match=r"max_queued_requests = 1"):
            await stub.Echo(echo(), timeout=1)
        service.gate.set()
        await asyncio.gather(*calls)
        await discovery.close()

    async def test_the_service_says_how_its_replicas_are_chosen(
        self, cluster: Cluster, discovery: FakeDiscovery
    ) -> None:
        servers = [await cluster.start(EchoService(name)) for name in ("r1", "r2")]
        listed = [(f"r{number}", address(server), False) for number, server in enumerate(servers, 1)]
        discovery.say("echo-child", *listed, policy="round_robin")
        (stub, channel), (_, own) = make(), make(policy="least_ongoing")

        def policies() -> list[str]:
            return [type(one.binding().router.policy).__name__ for one in (channel, own)]

        await channel.channel_ready()
        await until(lambda: len(channel.pool().replicas()) == 2, "both are known")
        await until(lambda: all(r.connection.ready for r in channel.pool().replicas()), "both are there")
        assert policies() == ["RoundRobin", "LeastOngoing"], "a handle that says something is not overruled"
        answers = [await _reply(stub, "hi") for _ in range(6)]
        assert answers in (["r1: hi", "r2: hi"] * 3, ["r2: hi", "r1: hi"] * 3)

        discovery.say("echo-child", *listed, policy="consistent_hash")
        await until(lambda: policies() == ["ConsistentHash", "LeastOngoing"], "it says something else")
        same = {(await stub.Echo(echo("hi"), metadata=(("x-session-id", "s"),))).response for _ in range(10)}
        assert len(same) == 1
        discovery.say("echo-child", *listed)
        await until(lambda: policies() == ["PowerOfTwo", "LeastOngoing"], "it says nothing any more")

    async def test_replicas_on_this_machine_come_first(self, cluster: Cluster) -> None:
        services = [EchoService("far"), EchoService("near")]
        servers = [await cluster.start(service) for service in services]
        discovery = FakeDiscovery()
        listed = [(f"r{number}", address(server), False) for number, server in enumerate(servers)]
        discovery.say("echo-child", *listed, limit=2, nodes={"r0": "there", "r1": "here"})
        Clients.use(Settings(discovery=f"127.0.0.1:{await discovery.listen()}", node="here"))
        stub, channel = make(prefer_local=True)
        channel.pool()
        await until(lambda: connected(channel) == 2, "both are connected")
        assert {await _reply(stub, "hi") for _ in range(10)} == {"near: hi"}
        filling = [asyncio.ensure_future(_reply(stub, "wait")) for _ in range(2)]
        await until(lambda: services[1].begun == 2, "the near one is full")
        assert await _reply(stub, "hi") == "far: hi"
        services[1].gate.set()
        await asyncio.gather(*filling)
        await discovery.close()


NAMES = ["", ":50051", "ranker:", "ranker:x", "ranker:70000", "x" * 64]
"""Of no service: calls would wait to their deadlines for an address that never comes."""


class TestPolicies:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            *[({"service": name}, "service: expected a service's name, or name:port, found ") for name in NAMES],
            ({"policy_kwargs": {"a": 1}}, "policy_kwargs: expected a policy beside them"),
            ({"policy": "best"}, "policy: expected one of"),
            ({"policy": "no_such_module:Best"}, 'policy "no_such_module:Best": the module "no_such_module" cannot be'),
            ({"max_queued_requests": -2}, "max_queued_requests: expected an integer >= -1"),
            ({"timeout_s": 0}, "timeout_s: expected a number of seconds above 0, found 0"),
            ({"transport": "pigeon"}, "transport: expected one of"),
        ],
    )
    def test_what_cannot_be_is_refused_at_once(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}"):
            handle(EchoStub, **{"service": "echo-child", **options})


async def test_a_stream_of_requests_that_a_draining_replica_refuses_moves_before_its_first_message(
    cluster: Cluster,
) -> None:
    leaving, staying = [await cluster.start(Pipes()) for _ in range(2)]
    know(leaving, staying)
    channel = HandleChannel("echo-child", metrics=RuntimeMetrics(), policy="round_robin")
    await until(lambda: connected(channel) == 2, "both are connected")
    stub = PipesStub(channel)
    held = [stub.Talk(timeout=PATIENCE_S) for _ in range(2)]  # one each: the drain lasts
    for call in held:
        await call.write(b"1")
        await call.read()
    leaving.stop()
    await until(lambda: leaving.state == "draining", "it drains")
    calls = [stub.Talk(timeout=PATIENCE_S) for _ in range(2)]  # again one each
    await until(lambda: any(call.done() for call in calls), "the refusal has come")
    for call in calls:
        await call.write(b"2")
        assert await call.read() == b"2"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    for call in held:
        call.cancel()
    await cluster.ended(leaving)
