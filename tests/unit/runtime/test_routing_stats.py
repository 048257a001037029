"""Numbers that replicas publish, from the replica to the callers' policies, by replies and by discovery."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead import Settings
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.calls.replica import Endpoint, Replica, ReplicaListing
from pierhead.metrics import RuntimeMetrics
from pierhead.policies.policy import C, RoutedCall
from pierhead.replica.admin import admin_pages
from pierhead.routing_stats import MOST_NUMBERS, NOTHING, Published, Stats, parse_stats, publish

from tests.unit.runtime.harness import Cluster, EchoService, address, echo
from tests.unit.runtime.test_pool import World

names = st.from_regex(r"[a-z_][a-z0-9_]{0,20}", fullmatch=True)
numbers = st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=MOST_NUMBERS)


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> Published:
    """This process's, created again."""
    made = Published()
    for module in ("routing_stats", "edge.edge", "replica.server"):
        monkeypatch.setattr(f"pierhead.{module}.STATS", made)
    return made


class TestPublishing:
    def test_a_number_stays_until_it_is_published_again(self) -> None:
        stats = Published(Clock())
        stats.publish({"running": 3, "waiting": 1})
        stats.publish({"running": 2})
        assert stats.numbers == {"running": 2.0, "waiting": 1.0}

    def test_the_version_grows_with_each_change_and_only_then_also_when_the_clock_goes_back(self) -> None:
        clock = Clock()
        stats = Published(clock)
        versions = [stats.version]
        for running in (1, 1, 2, 3):
            stats.publish({"running": running})
            versions.append(stats.version)
            clock.now -= 10
        assert versions == [0, 1_000_000_000, 1_000_000_000, 1_000_000_001, 1_000_000_002]

    def test_a_new_process_has_greater_versions(self) -> None:
        clock = Clock()
        old, new = Published(clock), Published(clock)
        for running in range(1000):
            old.publish({"running": running})
        clock.now += 1
        new.publish({"running": 0})
        assert new.version > old.version

    @given(numbers)
    def test_what_travels_is_what_was_published(self, given: Mapping[str, float]) -> None:
        stats = Published(Clock())
        stats.publish(given)
        heard = parse_stats(stats.text)
        if not given:
            assert heard is None
            return
        assert heard is not None
        assert heard.version == stats.version
        assert heard.numbers == {name: pytest.approx(number, rel=1e-5) for name, number in given.items()}
        assert len(stats.text) < 4096

    @given(st.one_of(st.none(), st.text(), st.from_regex(r"\A[0-9-]{0,5}(;[a-z]{0,3}=?[0-9naif.]{0,4}){0,3}\Z")))
    def test_whatever_a_replica_says_nothing_breaks(self, text: str | None) -> None:
        heard = parse_stats(text)
        assert heard is None or (heard.version > 0 and all(map(math.isfinite, heard.numbers.values())))

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"running": math.nan}, "running: expected a finite number, found nan"),
            ({"running": "3"}, "running: expected a finite number, found '3'"),
            ({"running": True}, "running: expected a finite number, found True"),
            ({"a;b": 1}, 'expected a name of ASCII letters, digits and _ up to 64, found "a;b"'),
            ({"x" * 65: 1}, "expected a name of"),
            ({f"n{number}": number for number in range(17)}, "expected at most 16 names in all, found 17"),
        ],
    )
    def test_what_cannot_be_published_is_refused_and_nothing_changes(self, given: dict[str, Any], words: str) -> None:
        stats = Published()
        with pytest.raises(ValueError, match=words):
            stats.publish(given)
        assert (stats.version, stats.numbers) == (0, NOTHING)

    async def test_readyz_tells_them(self, stats: Published, cluster: Cluster) -> None:
        publish(running=3, kv_use=0.25)
        server = await cluster.start(EchoService())
        readiness = server.readiness()
        assert (readiness.stats, readiness.stats_version) == ({"running": 3.0, "kv_use": 0.25}, stats.version)
        page = admin_pages(lambda: readiness, lambda: b"")["GET", "/readyz"](b"")
        assert json.loads(page.body)["stats"] == {"running": 3.0, "kv_use": 0.25}


class TestTheNewestIsKept:
    def test_of_what_replies_and_sources_say(self) -> None:
        world = World(10)
        lease = world.must_take()
        replica = lease.replica
        assert replica.stats == {}
        heard = []
        for version, by_reply in ((5, True), (4, False), (6, False), (6, True), (3, True), (7, True)):
            told = Stats(version, {"running": float(version)})
            if by_reply:
                world.pool.report(lease, 1, world.now, None, told)
            else:
                world.pool.update(
                    ReplicaListing([Endpoint("r0", replica.address, max_ongoing_requests=10, stats=told)])
                )
            heard.append(replica.stats["running"])
        assert heard == [5, 5, 6, 6, 6, 7]
        world.pool.report(lease, 1, world.now)
        assert replica.stats == {"running": 7.0}, "a reply that tells nothing changes nothing"

    def test_a_new_process_at_the_address_starts_from_nothing(self) -> None:
        replica = Replica(Endpoint("r0", "10.0.0.1:1", stats=Stats(9, {"running": 9.0})))
        replica.renewed()
        assert (replica.stats, replica.stats_version) == ({}, 0)
        replica.learn(Stats(2, {"running": 1.0}))
        assert replica.stats == {"running": 1.0}


class Remembers:
    """A policy that keeps what it could read of its candidates."""

    seen: ClassVar[Mapping[str, Mapping[str, float]]] = {}

    def __init__(self, _: Random) -> None:
        pass

    def choose(self, candidates: Sequence[C], _: RoutedCall) -> C:
        Remembers.seen = {candidate.name: candidate.stats for candidate in candidates}
        return candidates[0]


class TestCallers:
    async def test_replies_bring_them_and_again_when_they_change(self, stats: Published, cluster: Cluster) -> None:
        """Over plain gRPC; for lanes see test_lane_wire.py."""
        server = await cluster.start(EchoService())
        Clients.use(Settings(static={"ECHO_CHILD": (address(server),)}))
        channel = HandleChannel(
            "echo-child", metrics=RuntimeMetrics(), transport="grpc", policy=f"{__name__}:Remembers"
        )
        one = channel.unary_unary("/pierhead.echo.v1.Echo/Echo", lambda message: message.SerializeToString(), bytes)
        await one(echo())
        (replica,) = channel.pool().replicas()
        assert replica.stats == {}
        replica.set_others(1, math.inf)  # so that there is something to choose by: a lone replica's word is not read
        for running in (3, 7):
            publish(running=running)

            async def heard(running: int = running) -> bool:
                await one(echo())
                replica.set_others(1, math.inf)
                return replica.stats == {"running": running}

            async with asyncio.timeout(10):
                while not await heard():
                    pass
        await one(echo())
        assert Remembers.seen == {replica.name: {"running": 7.0}}
