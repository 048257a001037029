"""Times of tasks and services by this machine's clock: Swarm writes them by the clocks of its leader and its nodes.

A clock that is minutes off must not let a replica look late that has just started. So a time that is new since the
last reading lies between the two readings. One that says otherwise is by a wrong clock: the replica counts from when it
was first seen. The first reading has nothing before it, so what seems young counts from then. Each time is converted
once: it also tells one start from another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..model.world import ReplicaContainer

LATE_S = 5.0
"""For so long a start may be unknown to a manager that answers."""
YOUNG_S = 600.0
"""What is older at the first reading is not starting any more, by whichever clock."""


class Times:
    """The conversion; forgets replicas that are gone."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._read_at: float | None = None
        """When the last reading began."""
        self._known: dict[tuple[str, float], float] = {}
        self._started: dict[str, float | None] = {}
        """The last start of each replica."""

    def converted(self, found: Iterable[ReplicaContainer], read_at: float) -> tuple[ReplicaContainer, ...]:
        """The replicas of a reading that began then."""
        now = self.clock()
        known: dict[tuple[str, float], float] = {}
        after = tuple(self._converted(one, now, known) for one in found)
        self._known, self._read_at = known, read_at
        self._started = {one.id: one.started_at for one in after}
        return after

    def _converted(self, one: ReplicaContainer, now: float, known: dict[tuple[str, float], float]) -> ReplicaContainer:
        def convert(at: float) -> float:
            key = (one.id, at)
            known[key] = self._known[key] if key in self._known else self._first_seen(at, now)
            return known[key]

        created = convert(one.created_at)
        started = one.started_at
        if started is not None and not one.state.is_up and self._started.get(one.id) is not None:
            started = self._started[one.id]  # the start of what has ended was seen
        elif started is not None:
            started = max(created, convert(started))
        if (created, started) == (one.created_at, one.started_at):
            return one
        return replace(one, created_at=created, started_at=started)

    def _first_seen(self, at: float, now: float) -> float:
        if self._read_at is None:
            return at if at < now - YOUNG_S else now
        return at if self._read_at - LATE_S <= at <= now else now
