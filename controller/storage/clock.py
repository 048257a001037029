"""Time that only goes forward, one second a second: deadlines, delays and backoffs are measured with it.

A wall clock is set: by hand, by NTP after an hour without network, when a virtual machine moves. A controller that took
such a step for time that has passed would find every deadline over at once, or wait an hour for a second.

So "now" is the wall clock's reading when the controller started, and what the kernel's monotonic clock has counted
since. If the wall clock was set back before a restart, a deadline that was running then comes late, once. Events carry
the wall clock's time: it is for people.

What the engine says of containers is wall clock time too; `ContainerTimes` converts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..model.world import ReplicaContainer

_ROUNDING_S = 1e-6  # seconds since 1970 are told apart to a quarter of it

Clock = Callable[[], float]


SAME_S = 0.01
"""Two clocks that are no further apart have been read one after the other, and nobody has set one."""


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
    """When containers were made and started, by the controller's clock. Each is brought over once, when first seen."""

    def __init__(self, now: Clock, wall: Clock) -> None:
        self._now = now
        self._wall = wall
        self._known: dict[tuple[str, float], float] = {}

    def brought_over(self, containers: Iterable[ReplicaContainer]) -> tuple[ReplicaContainer, ...]:
        """The containers with their times replaced; forgets those that are not among them."""
        now, ahead = self._now(), self._wall() - self._now()
        ahead = ahead if abs(ahead) > SAME_S else 0.0
        known: dict[tuple[str, float], float] = {}

        def over(container_id: str, at: float) -> float:
            key = (container_id, at)
            known[key] = self._known[key] if key in self._known else steady_time(at, now, ahead)
            return known[key]

        def steady(container: ReplicaContainer) -> ReplicaContainer:
            created = over(container.id, container.created_at)
            started = None if container.started_at is None else over(container.id, container.started_at)
            if (created, started) == (container.created_at, container.started_at):
                return container  # nobody has set the clock: the usual case, without a copy of every replica
            return replace(container, created_at=created, started_at=started)

        found = tuple(steady(container) for container in containers)
        self._known = known
        return found


def steady_time(at: float, now: float, ahead: float) -> float:
    """What the controller's clock said, or would have said, when the wall clock said `at`. Pure.

    `ahead`: how far the wall clock is ahead of the controller's now. Whether it was so then as well cannot be known of
    a container that an earlier controller has seen: of both answers that lie in the past the later one counts. A
    deadline may then come late by the length of the step, and never early.
    """
    # What began just now may lie in the future by the rounding of these differences.
    return max((min(guess, now) for guess in (at, at - ahead) if guess <= now + _ROUNDING_S), default=now)
