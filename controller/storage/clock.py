"""A monotonic clock in seconds since 1970, for deadlines, delays and backoffs.

A wall clock may be set: by hand, by NTP after an hour without network, when a virtual machine migrates. If such a step
counted as time that has passed, every deadline would be over at once, or a second would last an hour.

So "now" is the wall clock's time when the controller started plus the time counted by the kernel's monotonic clock. If
the wall clock was set back before a restart, a deadline that was running then comes late, once. Events have the wall
clock's time, as users read them.

The engine's times of containers are by the wall clock; `ContainerTimes` converts them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..model.world import ReplicaContainer

_ROUNDING_S = 1e-6  # the resolution of a float of seconds since 1970 is a quarter of this

Clock = Callable[[], float]


SAME_S = 0.01
"""A smaller difference between two clocks comes from the time between their readings, not from setting one."""


class SteadyClock:
    """Seconds since 1970 as the wall clock had them when the controller started, and never set since.

    `not_before`: the latest time in the state, which must not seem to lie in the future.
    """

    def __init__(self, not_before: float, wall: Clock = time.time, monotonic: Clock = time.monotonic) -> None:
        self._began = max(wall(), not_before) - monotonic()
        self._monotonic = monotonic

    def __call__(self) -> float:
        """The time now."""
        return self._began + self._monotonic()


class ContainerTimes:
    """The creation and start times of containers by the controller's clock. Each is converted once, when first seen.

    What the reading before did not have came about after it began, whatever another machine's clock says.
    """

    def __init__(self, now: Clock, wall: Clock) -> None:
        self._now = now
        self._wall = wall
        self._known: dict[tuple[str, float], float] = {}
        self._readings = -math.inf, -math.inf
        """When the last reading began, and the one before it."""

    def brought_over(self, containers: Iterable[ReplicaContainer], read_at: float) -> tuple[ReplicaContainer, ...]:
        """The containers of the reading that began then, with converted times; forgets those that are not there."""
        now, ahead = self._now(), self._wall() - self._now()
        ahead = ahead if abs(ahead) > SAME_S else 0.0
        known: dict[tuple[str, float], float] = {}
        if read_at != self._readings[0]:
            self._readings = read_at, self._readings[0]
        before = self._readings[1]

        def over(container_id: str, at: float, not_before: float) -> float:
            key = (container_id, at)
            known[key] = self._known[key] if key in self._known else max(steady_time(at, now, ahead), not_before)
            return known[key]

        def steady(container: ReplicaContainer) -> ReplicaContainer:
            created = over(container.id, container.created_at, before)
            since = before if container.state.is_up else created
            started = None if container.started_at is None else over(container.id, container.started_at, since)
            if (created, started) == (container.created_at, container.started_at):
                return container  # the clock was not set: the usual case, without a copy of every replica
            return replace(container, created_at=created, started_at=started)

        found = tuple(steady(container) for container in containers)
        self._known = known
        return found


def steady_time(at: float, now: float, ahead: float) -> float:
    """What the controller's clock said, or would have said, when the wall clock said `at`. Pure.

    `ahead`: how far the wall clock is ahead of the controller's clock now. For a container that an earlier controller
    has seen, it is not known whether the wall clock was set before or after `at`, so two times are possible: the later
    one of those in the past is used. A deadline may then come late by the size of the step, but never early.
    """
    # Rounding of these differences may put a container that has just started into the future.
    return max((min(guess, now) for guess in (at, at - ahead) if guess <= now + _ROUNDING_S), default=now)
