"""Times of nodes whose clocks are wrong -> times by this machine's clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.engines.swarm_times import YOUNG_S, Times
from controller.model.world import ContainerState, ReplicaContainer

NOW = 1_800_000_000.0


class Engine:
    """Reads replicas every ten seconds. `now` is this machine's clock."""

    def __init__(self) -> None:
        self.now = NOW
        self.times = Times(lambda: self.now)

    def read(self, *found: ReplicaContainer) -> ReplicaContainer | None:
        self.now += 10
        converted = self.times.converted(found, self.now - 0.1)
        return converted[0] if converted else None


def replica(created: float, started: float | None, state: ContainerState = ContainerState.RUNNING) -> ReplicaContainer:
    return ReplicaContainer(
        "s1", "shop-web-1a2b3c4d-1", "web", "1a2b3c4d", 1, state, created_at=created, started_at=started
    )


@pytest.mark.parametrize("skew", [-120.0, 0.0, 120.0])
def test_a_start_counts_from_its_first_sight_where_the_node_s_clock_is_wrong(skew: float) -> None:
    engine = Engine()
    assert engine.read() is None
    made = engine.now + 2
    up = replica(made, made + 3 + skew)
    seen = engine.read(up)
    assert seen is not None
    expected = made + 3 if not skew else engine.now
    assert (seen.created_at, seen.started_at) == (made, expected)
    assert engine.read(up) == seen
    ended = engine.read(replace(up, state=ContainerState.EXITED, started_at=made + 1))
    assert ended is not None
    assert ended.started_at == expected, "several that end together are one try by when they began"
    again = engine.read(replace(up, started_at=engine.now + 5 + skew))
    assert again is not None
    assert again.started_at == (engine.now - 5 if not skew else engine.now)


def test_what_is_old_at_the_first_reading_is_not_starting_any_more() -> None:
    old, young = NOW - YOUNG_S - 60, NOW - 100
    engine = Engine()
    assert engine.read(replica(old, old + 1)) == replica(old, old + 1)
    other = Engine()
    assert other.read(replica(young, young + 1)) == replica(other.now, other.now)
