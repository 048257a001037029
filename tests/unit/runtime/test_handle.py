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
    NoReplica,
    PayloadTooLarge,
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

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, EchoService, FakeDiscovery, address, echo, know, until

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
    async def test_every_call_has_a_deadline(self, cluster: Cluster) -> None:
        service = EchoService()
        know(await cluster.start(service), request_timeout_s=7.0)
        await make()[0].Echo(echo())
        (seen,) = service.seen
        assert seen is not None
        assert 5 < seen.deadline - time.monotonic() <= 7.01  # gRPC's wire has whole milliseconds, rounded up


class TestRefusals:
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


class TestDiscovery:
    async def test_a_caller_keeps_its_last_list_until_a_controller_that_knows_the_service_sends_another(
        self, cluster: Cluster
    ) -> None:
        server = await cluster.start(EchoService())
        discovery, successor = FakeDiscovery(), FakeDiscovery()
        port = await discovery.listen()
        discovery.say("echo-child", ("r1", address(server), False))
        Clients.use(Settings(discovery=f"127.0.0.1:{port}"))
        stub, channel = make()
        await _reply(stub, "hi")
        await discovery.close()
        await _reply(stub, "without a controller")
        await successor.listen(port)
        await until(lambda: successor.watches > 0, "the next controller is asked")
        await _reply(stub, "the next one does not know the service")
        assert [replica.name for replica in channel.pool().replicas()] == ["r1"]
        successor.say("echo-child", ("r2", address(server), False))
        await until(lambda: [r.name for r in channel.pool().replicas()] == ["r2"], "its list is taken over")
        await successor.close()

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
