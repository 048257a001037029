"""Discovery over a real channel: whole state at once, then every change, the newest wins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.discovery.served import MOST_IN_ALL, MOST_OF_A_CALLER, DiscoveryServer, DiscoveryState
from pierhead.discovery.v1 import discovery_pb2, discovery_pb2_grpc

from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.control import until

READY, DRAINING = discovery_pb2.Endpoint.READY, discovery_pb2.Endpoint.DRAINING


def endpoint(number: int, *, draining: bool = False) -> discovery_pb2.Endpoint:
    return discovery_pb2.Endpoint(
        replica=f"p-web-v-{number}",
        address=f"10.0.0.{number}:50051",
        state=DRAINING if draining else READY,
        node=f"node-{number}",
    )


def of(*replicas: discovery_pb2.Endpoint, **settings: Any) -> discovery_pb2.ServiceEndpoints:
    given = {"max_queued_requests": -1, "policy": "power_of_two", **settings}
    return discovery_pb2.ServiceEndpoints(endpoints=replicas, **given)


@contextlib.asynccontextmanager
async def serving(discovery_state: DiscoveryState) -> AsyncIterator[discovery_pb2_grpc.DiscoveryAsyncStub]:
    server = DiscoveryServer(discovery_state, "127.0.0.1", 0)
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
    discovery_state = DiscoveryState(epoch=7)
    discovery_state.publish({"web": of(endpoint(1), endpoint(2))})
    async with serving(discovery_state) as stub:
        call = aiter(stub.Watch(request("web", "nobody")))
        first, unknown = await read(call), await read(call)
        assert (first.service, first.generation, first.epoch, first.unknown) == ("web", 1, 7, False)
        assert [(e.replica, e.address, e.node, e.state) for e in first.endpoints] == [
            ("p-web-v-1", "10.0.0.1:50051", "node-1", READY),
            ("p-web-v-2", "10.0.0.2:50051", "node-2", READY),
        ]
        assert (unknown.unknown, unknown.generation, unknown.policy) == (True, 0, "")
        assert (list(unknown.known_services), list(first.known_services)) == (["web"], [])
        assert (unknown.scaled_to_zero_by, unknown.HasField("max_queued_requests")) == ("", False)
        discovery_state.publish({"web": of(endpoint(1), endpoint(2))})
        discovery_state.publish({"web": of(endpoint(1), endpoint(2, draining=True))})
        second = await read(call)
        assert second.generation == 2, "what did not change is not sent"
        assert [e.state for e in second.endpoints] == [READY, DRAINING]
        discovery_state.publish({})
        third = await read(call)
        assert (third.unknown, len(third.endpoints), third.generation) == (True, 0, 3)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("max_queued_requests", -1, 0),
        ("policy", "power_of_two", "my.routing:Mine"),
        ("policy_kwargs", "", '{"balance":1.5}'),
        ("scaled_to_zero_by", "", "`pierhead scale`"),
    ],
)
async def test_a_change_of_a_setting_alone_is_sent(name: str, before: Any, after: Any) -> None:
    discovery_state = DiscoveryState()
    discovery_state.publish({"web": of()})
    async with serving(discovery_state) as stub:
        call = aiter(stub.Watch(request("web")))
        assert getattr(await read(call), name) == before
        for generation, value in ((2, after), (3, before)):
            discovery_state.publish({"web": of(**{name: value})})
            state = await read(call)
            assert (getattr(state, name), state.generation) == (value, generation)


async def test_nothing_is_sent_before_the_world_was_seen() -> None:
    discovery_state = DiscoveryState()
    async with serving(discovery_state) as stub:
        call = aiter(stub.Watch(request("web", "nobody")))
        first = asyncio.ensure_future(anext(call))
        await until(lambda: discovery_state.watchers == 1)
        assert not first.done()
        discovery_state.publish({"web": of(endpoint(1))})
        assert (await first).service == "web"
        assert (await read(call)).unknown


async def test_a_caller_that_leaves_is_forgotten() -> None:
    discovery_state = DiscoveryState()
    discovery_state.publish({"web": of()})
    async with serving(discovery_state) as stub:
        call = stub.Watch(request("web"))
        await read(aiter(call))
        assert discovery_state.watchers == 1
        call.cancel()
        await until(lambda: discovery_state.watchers == 0)


@pytest.mark.parametrize(
    ("services", "words"),
    [
        ((), "at least one"),
        (("web", ""), "an empty one"),
        (tuple(map(str, range(1001))), "at most 1000"),
        (("w" * 300,), "253"),
    ],
)
async def test_bad_requests_say_what_is_wrong(services: tuple[str, ...], words: str) -> None:
    async with serving(DiscoveryState()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(aiter(stub.Watch(request(*services))))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (caught.value.details() or "")


async def test_a_slow_caller_is_sent_only_the_newest() -> None:
    discovery_state = DiscoveryState()
    discovery_state.publish({"web": of(), "api": of()})
    watcher = discovery_state.watch(["web", "api", "web"])
    for number in range(100):
        discovery_state.publish({"web": of(endpoint(number)), "api": of()})
    sent = [discovery_state.state(await watcher.take()) for _ in range(2)]
    assert [state.service for state in sent] == ["web", "api"]
    assert sent[0].endpoints[0].replica == "p-web-v-99"
    assert watcher.due == (), "each once, and no state waits in memory"


def with_stats(version: int, *, draining: bool = False) -> dict[str, discovery_pb2.ServiceEndpoints]:
    one = endpoint(1, draining=draining)
    one.stats.update({"running": float(version)} if version else {})
    one.stats_version = version
    return {"web": of(one)}


async def test_watches_are_bounded_by_caller_and_in_all() -> None:
    """One caller takes no place of another one, and what ends makes room."""
    discovery_state = DiscoveryState()
    discovery_state.publish({"web": of(endpoint(1))})
    async with serving(discovery_state) as stub:
        held = [stub.Watch(request("web")) for _ in range(MOST_OF_A_CALLER)]
        for call in held:
            await read(aiter(call))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(aiter(stub.Watch(request("web"))))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"127.0.0.1 has {MOST_OF_A_CALLER} watches already" in (refused.value.details() or "")
        held.pop().cancel()
        await until(lambda: discovery_state.watchers < MOST_OF_A_CALLER)
        await read(aiter(stub.Watch(request("web"))))
    assert discovery_state.crowded("10.0.0.9") == ""
    for number in range(MOST_IN_ALL):
        discovery_state.watch(["web"], address=f"10.1.{number // 200}.{number % 200}")
    assert f"{MOST_IN_ALL} watches" in discovery_state.crowded("10.0.0.9")


@pytest.mark.parametrize(
    ("address", "name", "counts"),
    [
        ("10.0.0.1", "p-web-v-1", True),
        ("10.0.0.1", "p-web-v-2", False),
        ("10.0.0.1", "p-other-v-1", False),
        ("10.9.9.9", "p-starting-v-1", True),
    ],
    ids=["its own", "another replica's", "of none that is known", "not a replica's address, or not one yet"],
)
def test_a_replica_watches_under_its_own_name_only(address: str, name: str, counts: bool) -> None:
    """Rollouts go in the order of what replicas call: a replica does not say what another one calls."""
    discovery_state = DiscoveryState()
    discovery_state.publish({"web": of(endpoint(1), endpoint(2))})
    discovery_state.watch(["ranker"], name, address)
    assert discovery_state.callers() == ({name: frozenset({"ranker"})} if counts else {})


def test_a_change_of_published_numbers_alone_is_sent_once_a_second_and_then_the_newest() -> None:
    """They change all the time, and each change would wake every watcher."""
    now = [100.0]
    discovery_state = DiscoveryState(clock=lambda: now[0])
    sent = []
    for version in range(33):
        discovery_state.publish(with_stats(version))
        (replica,) = discovery_state.state("web").endpoints
        sent.append((replica.stats_version, dict(replica.stats)))
        now[0] += 0.125
    assert list(map(dict, dict.fromkeys(tuple(stats.items()) for _, stats in sent))) == [
        {},
        *({"running": float(version)} for version in (8, 16, 24, 32)),
    ]
    discovery_state.publish(with_stats(33))
    discovery_state.publish(with_stats(34, draining=True))
    (replica,) = discovery_state.state("web").endpoints
    assert (replica.state, replica.stats_version) == (DRAINING, 34), "they go with what is sent earlier"


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b"]), st.lists(st.integers(1, 3), unique=True)), max_size=12))
def test_generations_grow_exactly_with_changes(history: list[dict[str, list[int]]]) -> None:
    discovery_state = DiscoveryState()
    for published in history:
        before = {name: discovery_state.state(name) for name in ("a", "b")}
        discovery_state.publish({name: of(*map(endpoint, numbers)) for name, numbers in published.items()})
        for name, old in before.items():
            new = discovery_state.state(name)
            same = list(new.endpoints) == list(old.endpoints) and new.unknown == old.unknown
            assert new.generation == old.generation + (0 if same else 1)
