"""Time that only goes forward, one second a second: what deadlines, delays and backoffs are measured with.

A wall clock is set: by hand, by NTP after an hour without network, by whoever moves a virtual machine. A controller
that took such a step for time that has passed would find every deadline over at once, or wait an hour for a second.

So "now" is a wall clock's reading that was taken once, and what the kernel's monotonic clock has counted since. The
reading is kept with the state: a controller that follows another one on the same boot of the machine goes on with it,
and what was written down before a step stays comparable with what comes after. Events carry the wall clock's time: it
is for people.

What the engine says of containers is wall clock time too; `ContainerTimes` brings it over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..model.world import ReplicaContainer

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDING_S = 1e-6  # seconds since 1970 are told apart to a quarter of it

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Anchor:
    """One moment, by both clocks (seconds). `monotonic` means something during one boot of the machine only."""

    boot: str
    wall: float
    monotonic: float


def anchored(kept: Anchor | None, here: Anchor, not_before: float) -> Anchor:
    """The anchor to go by: the kept one where it is of this boot, else `here`, the clocks as they are. Pure.

    `not_before` is the latest time that the state speaks of: after it nothing may seem to lie in the future.
    """
    if kept is not None and kept.boot == here.boot and kept.boot and kept.monotonic <= here.monotonic:
        return kept
    return replace(here, wall=max(here.wall, not_before))


SAME_S = 0.01
"""Two clocks that are no further apart have been read one after the other, and nobody has set one."""


class SteadyClock:
    """Seconds since 1970 as the wall clock had them at the anchor; never set, never slower, never faster."""

    def __init__(self, anchor: Anchor, monotonic: Clock = time.monotonic) -> None:
        self._began = anchor.wall - anchor.monotonic
        self._monotonic = monotonic

    def __call__(self) -> float:
        """Seconds since 1970, or what would be that if nobody had set the clock since."""
        return self._began + self._monotonic()


def clocks_now() -> Anchor:
    """Read both clocks, and which boot this is; "" where the system does not say."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:  # not Linux: each controller then begins anew
        boot = ""
    return Anchor(boot, time.time(), time.monotonic())


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
