"""Calls through a handle to real replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from pierhead import NoReplica, PayloadTooLarge, ScaledToZero, Settings, close_handles, handle
from pierhead.calls import directory as directories
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.calls.directory import Directory, resolve
from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.metrics import RuntimeMetrics
from pierhead.policies.balanced import PowerOfTwo
from pierhead.policies.session import ConsistentHash
from pierhead.routing_stats import Stats

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, EchoService, FakeDiscovery, address, echo, know, until
from tests.unit.runtime.test_policies import CALL, Fake

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
    Clients.use(Settings(discovery=f"127.0.0.1:{await made.listen()}", node="here"))
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
        know(await cluster.start(service), request_timeout_s=50.0)
        await make()[0].Echo(echo())
        (seen,) = service.seen
        assert seen is not None
        assert 30 < seen.deadline - time.monotonic() <= 50.01  # gRPC's wire has whole milliseconds, rounded up


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
        discovery.say("echo-child", scaled_to_zero_by="`pierhead scale`")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ScaledToZero, match=r"echo-child is scaled to 0 replicas \(by `pierhead scale`\)"):
                await waiting
            with pytest.raises(NoReplica, match="`pierhead scale echo-child 1` does"):
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

    async def test_one_to_a_service_that_is_misspelt_names_those_that_there_are(
        self, monkeypatch: pytest.MonkeyPatch, discovery: FakeDiscovery
    ) -> None:
        monkeypatch.setattr(directories, "UNKNOWN_GRACE_S", 0.0)
        for name in ("echo-kid", "shop"):
            discovery.say(name)
        stub, _ = make()
        with pytest.raises(NoReplica, match=r'\(there are echo-kid, shop; did you mean "echo-kid"\?\)'):
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

        def update(listing: ReplicaListing) -> None:
            heard.extend(endpoint.name for endpoint in listing.endpoints)
            if len(heard) == 1:
                raise RuntimeError("a defect")

        directory.add("echo-child", update)
        await until(lambda: len(heard) >= 2, "the list is sent again")
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

    async def test_what_the_controller_says_of_a_service_its_handles_go_by(self, discovery: FakeDiscovery) -> None:
        """How they obey each of it is tested in test_pool.py, test_routing.py and test_calls.py."""
        listed = [("r1", "127.0.0.1:1", False), ("r2", "127.0.0.1:2", True)]
        stats = {"r1": (5, {"waiting": 2.0})}
        discovery.say(
            "echo-child", *listed, limit=2, max_queued=7, nodes={"r1": "here"}, policy="round_robin", stats=stats
        )
        (_, channel), (_, own) = make(), make(policy="least_ongoing", prefer_local=True, max_queued_requests=1)
        pool = channel.pool()
        await until(lambda: len(pool.listing.endpoints) == 2, "the list has come")
        assert [*pool.listing.endpoints] == [
            Endpoint("r1", "127.0.0.1:1", max_ongoing_requests=2, node="here", stats=Stats(5, {"waiting": 2.0})),
            Endpoint("r2", "127.0.0.1:2", draining=True, max_ongoing_requests=2),
        ]
        bindings = [channel.binding(), own.binding()]
        assert [binding.max_queued for binding in bindings] == [7, 1]
        policies = [type(binding.router.policy).__name__ for binding in bindings]
        assert policies == ["RoundRobin", "LeastOngoing"], "a handle that says something is not overruled"
        far, near = Fake("far", 0, node="there"), Fake("near", 9, node="here")
        assert bindings[1].router.choose([far, near], CALL) is near, "as it prefers replicas on its own machine"
        discovery.say("echo-child", *listed, policy="consistent_hash")
        await until(lambda: isinstance(bindings[0].router.policy, ConsistentHash), "the handle follows")
        discovery.say("echo-child", *listed)
        await until(lambda: isinstance(bindings[0].router.policy, PowerOfTwo), "the service says nothing any more")


NAMES = ["", ":50051", "ranker:", "ranker:x", "ranker:70000", "x" * 64]
"""Of no service: calls would wait to their deadlines for an address that never comes."""


class TestPolicies:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            *[({"service": name}, "service: expected a service's name, or name:port, found ") for name in NAMES],
            ({"policy_kwargs": {"a": 1}}, "policy_kwargs: expected together with a policy"),
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
