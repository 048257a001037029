"""The regions that this process has made: which is free, for whom, and which goes when there is no room. Pure.

idle --take--> filled: held by requests, named by messages --all let go, all released--> idle
  |                                                                |
  `--evicted: too long idle, or others need the room               `--removed: a receiver vanished with it
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

PAGE = 4096

MAX_REGIONS = 256
"""Each takes two file descriptors here, one at its receiver (its mapping's), and a mapping at both ends."""

ASK_AFTER_S = 1.0
"""How long after the end of its request content may be at a receiver before it is asked whether it still reads it."""


@dataclass(slots=True, eq=False)
class Region:
    """One region, and the content that it was last filled with."""

    name: bytes
    size: int
    memory: Any = None
    """The mapped memory; None until the caller of `take` has made it."""
    binding: Hashable = None
    """The one destination that may read it; None until it is known."""
    introduced: set[Hashable] = field(default_factory=set)
    """The open links that it was passed over."""
    passed: bool = False
    """It was ever passed to another process: its destination is final."""
    generation: int = 0
    holds: int = 0
    """Requests that the content belongs to, and arrays of it in this process."""
    calls: int = 0
    """Calls of this process in flight whose messages name the content."""
    out: dict[Hashable, int] = field(default_factory=dict)
    """By link: messages that name the content and were not released there."""
    spoiled: bool = False
    """A receiver vanished that may still read it: it is not filled again."""
    idle_at: float = 0.0
    asked_at: float = 0.0


class RegionPool:
    """All regions of one process. `now` is in seconds of any one clock."""

    def __init__(self, limit: int, new_name: Callable[[], bytes]) -> None:
        self.limit = limit
        self.bytes = 0
        self.removed: list[Region] = []
        """Regions that were evicted or removed; the owner empties this list and frees their memory."""
        self._new_name = new_name
        self._regions: dict[bytes, Region] = {}
        self._idle: dict[tuple[Hashable, int], list[Region]] = {}
        """By destination and size, used last at the end."""

    def __len__(self) -> int:
        return len(self._regions)

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def get(self, name: bytes) -> Region | None:
        """The region of that name."""
        return self._regions.get(name)

    # ---- content

    def take(self, length: int, binding: Hashable) -> Region | None:
        """A region to fill for one destination (None = not known yet), held once; None if there is no room."""
        size = capacity(length)
        stack = self._idle.get((binding, size))
        if stack:
            region = stack.pop()
        elif self._make_room(size):
            region = Region(self._new_name(), size)
            region.binding = binding
            self._regions[region.name] = region
            self.bytes += size
        else:
            return None
        region.generation += 1
        region.holds = 1
        region.calls = 0  # those of the former content, which nobody counts down any more
        return region

    def bind(self, region: Region, binding: Hashable) -> bool:
        """Bind filled content to a destination; False if its region is bound to another, which may have read it."""
        if region.binding != binding:
            if region.passed:
                return False
            region.binding = binding
        return True

    def filled(self, name: bytes, generation: int) -> Region | None:
        """The region, while it holds that content and a request holds the content."""
        region = self._regions.get(name)
        return region if region is not None and region.generation == generation and region.holds else None

    def hold(self, region: Region) -> None:
        """One more request, or array, holds the content."""
        region.holds += 1

    def let_go(self, name: bytes, generation: int, now: float, *, all_holds: bool = False) -> None:
        """A request or array that held the content has ended; `all_holds`: none holds it any more."""
        region = self.filled(name, generation)
        if region is not None:
            region.holds = 0 if all_holds else region.holds - 1
            region.asked_at = now
            self._settle(region, now)

    def sent(self, region: Region, link: Hashable) -> None:
        """A message that names the content goes over a link."""
        region.out[link] = region.out.get(link, 0) + 1

    def released(self, name: bytes, generation: int, link: Hashable, count: int, now: float) -> None:
        """Receivers at a link have released `count` messages that name the content."""
        region = self._regions.get(name)
        if region is None or region.generation != generation or link not in region.out:
            return
        region.out[link] -= count
        if region.out[link] <= 0:
            del region.out[link]
        self._settle(region, now)

    def lost(self, link: Hashable, binding: Hashable, now: float) -> None:
        """A link broke. `binding`: the destination that only it led to, if there is one."""
        for region in list(self._regions.values()):
            region.introduced.discard(link)
            if region.out.pop(link, 0) or (binding is not None and region.binding == binding):
                region.spoiled = True
                self._settle(region, now)

    def overdue(self, now: float) -> list[tuple[Region, list[Hashable]]]:
        """Content whose requests and calls have ended a while ago, and the links that have not released it."""
        found = []
        for region in self._regions.values():
            if region.out and not region.holds and not region.calls and now >= region.asked_at + ASK_AFTER_S:
                region.asked_at = now
                found.append((region, list(region.out)))
        return found

    def expire(self, before: float) -> None:
        """Remove regions that are idle since before that time."""
        for stack in list(self._idle.values()):
            for region in [region for region in stack if region.idle_at < before]:
                self.remove(region)

    def remove(self, region: Region) -> None:
        """Take a region out of the pool, whatever its state."""
        if self._regions.pop(region.name, None) is None:
            return
        self.bytes -= region.size
        key = (region.binding, region.size)
        stack = self._idle.get(key, [])
        if region in stack:
            stack.remove(region)
        if not stack:
            self._idle.pop(key, None)
        self.removed.append(region)

    # ---- inside

    def _settle(self, region: Region, now: float) -> None:
        if region.holds or region.out:
            return
        if region.spoiled:
            self.remove(region)
            return
        stack = self._idle.setdefault((region.binding, region.size), [])
        if region not in stack:
            region.idle_at = now
            stack.append(region)

    def _make_room(self, size: int) -> bool:
        if size > self.limit:
            return False
        while self.bytes + size > self.limit or len(self._regions) >= MAX_REGIONS:
            idle = [region for stack in self._idle.values() for region in stack]
            if not idle:
                return False
            self.remove(min(idle, key=lambda region: region.idle_at))
        return True


def capacity(length: int) -> int:
    """The size of the region for `length` bytes: four sizes for each power of two, so that regions are used again."""
    step = max(PAGE, 1 << max(0, (length - 1).bit_length() - 3))
    return max(1, -(-length // step)) * step
