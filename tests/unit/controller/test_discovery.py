"""Discovery over a real channel: whole state at once, then every change, the newest wins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead import ScaledToZero, Settings, close_handles
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.discovery.v1 import discovery_pb2, discovery_pb2_grpc
from pierhead.echo.v1.echo_pb2 import EchoRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.metrics import RuntimeMetrics

from controller.model.told import Endpoint, ServiceEndpoints
from controller.model.world import PublishedStats
from controller.status.discovery import STATS_PERIOD_S, Board, DiscoveryServer
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import service

READY, DRAINING = discovery_pb2.Endpoint.READY, discovery_pb2.Endpoint.DRAINING


def endpoint(number: int, *, draining: bool = False) -> Endpoint:
    return Endpoint(f"p-web-v-{number}", f"10.0.0.{number}:50051", draining, 100, "v", f"node-{number}")


def of(*replicas: Endpoint, line: int = -1) -> ServiceEndpoints:
    return ServiceEndpoints(replicas, line)


@contextlib.asynccontextmanager
async def serving(board: Board) -> AsyncIterator[discovery_pb2_grpc.DiscoveryAsyncStub]:
    server = DiscoveryServer(board, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield discovery_pb2_grpc.DiscoveryStub(channel)
    finally:
        await server.stop()


def request(*services: str) -> discovery_pb2.WatchRequest:
    return discovery_pb2.WatchRequest(services=services, watcher="test")


async def read(call: AsyncIterator[discovery_pb2.ServiceEndpoints]) -> discovery_pb2.ServiceEndpoints:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(call)


async def test_whole_state_at_once_then_changes() -> None:
    board = Board(epoch=7)
    board.publish({"web": of(endpoint(1), endpoint(2))})
    async with serving(board) as stub:
        call = aiter(stub.Watch(request("web")))
        first = await read(call)
        assert (first.service, first.generation, first.epoch, first.unknown) == ("web", 1, 7, False)
        assert [(e.replica, e.address, e.state) for e in first.endpoints] == [
            ("p-web-v-1", "10.0.0.1:50051", READY),
            ("p-web-v-2", "10.0.0.2:50051", READY),
        ]
        board.publish({"web": of(endpoint(1), endpoint(2))})
        board.publish({"web": of(endpoint(1), endpoint(2, draining=True))})
        second = await read(call)
        assert second.generation == 2, "what did not change is not told"
        assert [e.state for e in second.endpoints] == [READY, DRAINING]


async def test_the_bound_of_the_line_and_the_machines_are_told() -> None:
    board = Board()
    board.publish({"web": of(endpoint(1))})
    async with serving(board) as stub:
        call = aiter(stub.Watch(request("web", "nobody")))
        first = await read(call)
        assert (first.max_queued_requests, [e.node for e in first.endpoints]) == (-1, ["node-1"])
        unknown = await read(call)
        assert unknown.unknown
        assert not unknown.HasField("max_queued_requests")
        board.publish({"web": of(endpoint(1), line=0)})
        second = await read(call)
        assert second.HasField("max_queued_requests")
        assert (second.max_queued_requests, second.generation) == (0, 2), "a new bound alone is told too"


async def test_how_replicas_are_chosen_is_told_and_told_again_when_it_changes() -> None:
    board = Board()
    board.publish({"web": of(endpoint(1))})
    async with serving(board) as stub:
        call = aiter(stub.Watch(request("web", "nobody")))
        assert (await read(call)).policy == "power_of_two"
        assert (await read(call)).policy == "", "of a service that is not known nothing is said"
        board.publish({"web": replace(of(endpoint(1)), policy="my.routing:Mine")})
        second = await read(call)
        assert (second.policy, second.generation) == ("my.routing:Mine", 2)


async def test_who_has_set_a_service_to_zero_is_told_and_told_again_when_it_changes() -> None:
    board = Board()
    board.publish({"web": of()})
    async with serving(board) as stub:
        call = aiter(stub.Watch(request("web", "nobody")))
        assert (await read(call)).scaled_to_zero_by == ""
        unknown = await read(call)
        assert (unknown.unknown, unknown.scaled_to_zero_by) == (True, "")
        board.publish({"web": replace(of(), scaled_to_zero_by="`make scale`")})
        second = await read(call)
        assert (second.scaled_to_zero_by, second.generation) == ("`make scale`", 2)
        board.publish({"web": of()})
        assert (await read(call)).scaled_to_zero_by == ""


async def test_services_come_and_go() -> None:
    board = Board()
    board.publish({})
    async with serving(board) as stub:
        call = aiter(stub.Watch(request("web")))
        states = [await read(call)]
        for published in ({"web": of()}, {"web": of(endpoint(1))}, {}):
            board.publish(published)
            states.append(await read(call))
    assert [(s.unknown, len(s.endpoints), s.generation) for s in states] == [
        (True, 0, 0),
        (False, 0, 1),
        (False, 1, 2),
        (True, 0, 3),
    ]


async def test_nothing_is_told_before_the_world_was_seen() -> None:
    board = Board()
    async with serving(board) as stub:
        call = aiter(stub.Watch(request("web", "nobody")))
        first = asyncio.ensure_future(anext(call))
        await until(lambda: board.watchers == 1)
        assert not first.done()
        board.publish({"web": of(endpoint(1))})
        assert (await first).service == "web"
        assert (await read(call)).unknown


async def test_a_caller_that_leaves_is_forgotten() -> None:
    board = Board()
    board.publish({"web": of()})
    async with serving(board) as stub:
        call = stub.Watch(request("web"))
        await read(aiter(call))
        assert board.watchers == 1
        call.cancel()
        await until(lambda: board.watchers == 0)


@pytest.mark.parametrize(
    ("services", "words"),
    [((), "at least one"), (("web", ""), "an empty one"), (tuple(map(str, range(1001))), "at most 1000")],
)
async def test_bad_requests_say_what_is_wrong(services: tuple[str, ...], words: str) -> None:
    async with serving(Board()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(aiter(stub.Watch(request(*services))))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (caught.value.details() or "")


async def test_a_slow_caller_is_owed_only_the_newest() -> None:
    board = Board()
    board.publish({"web": of(), "api": of()})
    watcher = board.watch(["web", "api", "web"])
    for number in range(100):
        board.publish({"web": of(endpoint(number)), "api": of()})
    due = {state.service: state for state in await watcher.take()}
    assert due["web"].endpoints[0].replica == "p-web-v-99"
    assert len(due) == 2


class TestPublishedNumbers:
    """They change all the time, and every watcher would be woken each time."""

    @staticmethod
    def with_stats(version: int, *, draining: bool = False) -> dict[str, ServiceEndpoints]:
        stats = PublishedStats({"running": float(version)}, version) if version else PublishedStats()
        return {"web": of(replace(endpoint(1, draining=draining), stats=stats))}

    async def test_a_change_of_them_alone_is_told_once_a_second_and_then_the_newest(self) -> None:
        now = [100.0]
        board = Board(clock=lambda: now[0])
        watcher = board.watch(["web"])
        told = []
        for version in range(33):
            board.publish(self.with_stats(version))
            if watcher._due:
                (state,) = await watcher.take()
                told.append((now[0], state.endpoints[0].stats_version, dict(state.endpoints[0].stats)))
            now[0] += 0.125
        assert told == [
            (100.0, 0, {}),
            (101.0, 8, {"running": 8.0}),
            (102.0, 16, {"running": 16.0}),
            (103.0, 24, {"running": 24.0}),
            (104.0, 32, {"running": 32.0}),
        ]

    async def test_the_last_change_is_told_though_nothing_else_happens(self) -> None:
        now = [100.0]
        board = Board(clock=lambda: now[0])
        board.publish(self.with_stats(1))
        board.publish(self.with_stats(2))
        assert board.state("web").endpoints[0].stats_version == 1
        now[0] += STATS_PERIOD_S
        board.publish(self.with_stats(2))
        assert board.state("web").endpoints[0].stats_version == 2

    async def test_they_go_with_what_is_told_earlier(self) -> None:
        board = Board(clock=lambda: 100.0)
        board.publish(self.with_stats(1))
        board.publish(self.with_stats(2, draining=True))
        (told,) = board.state("web").endpoints
        assert (told.state, told.stats_version) == (DRAINING, 2)


async def test_what_replicas_publish_comes_from_their_probes_to_who_watches(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web", replicas=2))
    async with control.running() as controller:
        await control.settled("web", 2)

        def told() -> list[dict[str, float]]:
            return [dict(one.stats) for one in controller.board.state("web").endpoints]

        control.published["web"] = PublishedStats({"waiting": 1.0}, 1)
        await until(lambda: told() == [{"waiting": 1.0}] * 2)
        control.published["web"] = PublishedStats({"waiting": 2.0}, 2)
        await until(lambda: told() == [{"waiting": 2.0}] * 2)
        assert {one.stats_version for one in controller.board.state("web").endpoints} == {2}


async def test_callers_through_a_handle_hear_that_a_service_was_scaled_to_zero(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web", replicas=1), service("off", replicas=0))
    async with control.running() as controller:
        server = DiscoveryServer(controller.board, "127.0.0.1", 0)
        await server.start()
        Clients.use(Settings(discovery=f"127.0.0.1:{server.port}"))
        web, off = (HandleChannel(name, metrics=RuntimeMetrics()) for name in ("web", "off"))

        async def refused(channel: HandleChannel, by: str) -> None:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(ScaledToZero, match=f"by {by}.* and no request wakes it: `make scale SERVICE="):
                    await EchoStub(channel).Echo(EchoRequest(), timeout=600)

        try:
            await refused(off, "`replicas: 0` in the compose files")
            await until(lambda: len(web.pool().replicas()) == 1)
            assert web.pool().listing.absence is None
            controller.commands.scale("web", 0)
            await until(lambda: web.pool().listing.absence is not None and not web.pool().has_callable)
            await refused(web, "`make scale`")
            controller.commands.scale("web", 1)
            await until(lambda: web.pool().listing.absence is None)
        finally:
            await close_handles()
            await server.stop()


async def test_what_the_policy_is_made_with_is_told() -> None:
    board = Board()
    board.publish({"web": replace(of(), policy="prefix", policy_kwargs='{"balance":1.5}')})
    assert board.state("web").policy_kwargs == '{"balance":1.5}'


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b"]), st.lists(st.integers(1, 3), unique=True)), max_size=12))
def test_generations_grow_exactly_with_changes(history: list[dict[str, list[int]]]) -> None:
    board = Board()
    for published in history:
        before = {name: board.state(name) for name in ("a", "b")}
        board.publish({name: of(*map(endpoint, numbers)) for name, numbers in published.items()})
        for name, old in before.items():
            new = board.state(name)
            same = list(new.endpoints) == list(old.endpoints) and new.unknown == old.unknown
            assert new.generation == old.generation + (0 if same else 1)
