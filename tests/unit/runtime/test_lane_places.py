"""Several callers at a full replica: none has to starve, because a call of one with less than its share waits there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from pierhead import DeadlineExceeded, Settings
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
from pierhead.errors import ReplicaDied
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.server import ReplicaServer

from tests.unit.runtime.harness import Cluster, address, echo, until


class Turns(echo_pb2_grpc.EchoServicer):
    """Each call ends when the test says so; records who began, in order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end: list[asyncio.Event] = []

    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        self.begun.append(request.message)
        self._may_end.append(event := asyncio.Event())
        await event.wait()
        return echo_pb2.EchoReply(response=request.message)

    async def Generate(self, request: echo_pb2.GenerateRequest, context: Any) -> AsyncIterator[echo_pb2.Token]:
        yield echo_pb2.Token(text=request.message)

    async def end(self, place: int) -> None:
        """Let the call end that began as number `place`, once it has."""
        await until(lambda: len(self.begun) > place, f"call {place} has begun")
        self._may_end[place].set()

    async def end_all(self, count: int) -> None:
        for place in range(count):
            await self.end(place)


@dataclass
class World:
    """One replica with two callers, each with a lane of its own."""

    service: Turns
    server: ReplicaServer
    many: Any
    """Stub of the caller that fills the replica."""
    few: Any
    """Stub of the other."""
    few_channel: HandleChannel

    @property
    def waiting(self) -> int:
        return self.server._admission.waiting

    async def fill(self, calls: int) -> list[asyncio.Future[Any]]:
        """Begin so many calls of the first caller, of which as many as can be are worked on."""
        begun: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(_reply(self.many.Echo(echo("many"), timeout=30))) for _ in range(calls)
        ]
        places = self.server._admission.max_ongoing_requests
        await until(lambda: len(self.service.begun) == min(places, calls), "the replica is full")
        return begun

    def ask(self, **options: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(_reply(self.few.Echo(echo("few"), **options)))

    async def idle(self) -> None:
        await until(lambda: self.server.readiness().ongoing == 0 and self.waiting == 0, "nothing is left there")


async def _reply(call: Any) -> str:
    return str((await call).response)


@pytest.fixture
async def world(cluster: Cluster, request: pytest.FixtureRequest) -> World:
    service = Turns()
    server = await cluster.start(service, max_ongoing_requests=getattr(request, "param", 1))
    Clients.use(Settings(static={"MANY": (address(server),), "FEW": (address(server),)}))
    many, few = (HandleChannel(name, metrics=RuntimeMetrics(), transport="lane") for name in ("many", "few"))
    stubs = [echo_pb2_grpc.EchoStub(channel) for channel in (many, few)]
    for channel in (many, few):
        await channel.channel_ready()
    return World(service, server, stubs[0], stubs[1], few)


async def test_who_has_no_place_gets_the_next_one(world: World) -> None:
    many = await world.fill(6)
    few = world.ask(timeout=30)
    await until(lambda: world.waiting == 1, "the other's call waits at the replica")
    await world.service.end(0)
    assert (await many[0], world.server._admission.ongoing) == ("many", 1)
    await world.service.end(1)
    assert await few == "few"
    assert world.service.begun[:2] == ["many", "few"]
    for place in range(2, 7):
        await world.service.end(place)
    await asyncio.gather(*many)
    await world.idle()


@pytest.mark.parametrize("world", [4], indirect=True)
async def test_no_more_calls_wait_than_are_missing_to_a_share(world: World) -> None:
    many = await world.fill(10)
    few = [world.ask(timeout=30) for _ in range(5)]
    await until(lambda: world.waiting == 2, "half of the places, as there are two callers")
    await world.service.end(0)
    await until(lambda: world.service.begun[4:] == ["few"], "the first that waits begins")
    await world.service.end_all(15)
    await asyncio.gather(*many, *few)
    await world.idle()


@pytest.mark.parametrize("ends_by", ["cancel", "deadline"])
async def test_a_call_that_ends_while_it_waits_leaves_nothing_and_is_logged_under_its_own_id(
    world: World, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    logged: list[tuple[str, str]] = []
    monkeypatch.setattr(world.server.edge, "_log", lambda _, code, __, request_id: logged.append((code, request_id)))
    many = await world.fill(1)
    few = world.ask(timeout=0.5 if ends_by == "deadline" else 30, metadata=(("x-request-id", "mine"),))
    await until(lambda: world.waiting == 1 or bool(logged), "it waits, unless its time is over by now")
    if ends_by == "cancel":
        few.cancel()
    await until(lambda: len(logged) == 1, "its end is logged")
    with pytest.raises(asyncio.CancelledError if ends_by == "cancel" else DeadlineExceeded):
        await few
    assert logged[0][1] == "mine"
    await until(lambda: world.waiting == 0, "it does not wait any more")
    assert world.server.readiness().ongoing == 1, "the place of the call that is worked on is still taken"
    await world.service.end(0)
    await asyncio.gather(*many)
    assert world.service.begun == ["many"]
    await world.idle()


async def test_a_lane_that_is_lost_takes_its_waiting_calls_along(world: World) -> None:
    many = await world.fill(1)
    few = world.ask(timeout=30)
    await until(lambda: world.waiting == 1, "it waits")
    [replica] = world.few_channel.pool().replicas()
    await replica.connection.close()
    with pytest.raises(ReplicaDied):
        await few
    await until(lambda: world.waiting == 0, "it does not wait any more")
    await world.service.end(0)
    await asyncio.gather(*many)
    assert world.service.begun == ["many"]
    await world.idle()


async def test_a_call_that_may_go_elsewhere_is_refused_at_once(world: World, cluster: Cluster) -> None:
    """Else it would wait for one replica while another has room."""
    many = await world.fill(1)
    free = await cluster.start(second := Turns())
    world.few_channel.pool().update(
        ReplicaListing([Endpoint(f"{place}", address(server)) for place, server in enumerate((world.server, free))])
    )
    await until(lambda: sum(known.callable for known in world.few_channel.pool().replicas()) == 2, "both are known")
    few = [world.ask(timeout=30) for _ in range(4)]
    await until(lambda: len(second.begun) == 4, "all are where there is room")
    assert world.waiting == 0
    await world.service.end(0)
    await second.end_all(4)
    await asyncio.gather(*many, *few)
