"""A consistent-hash ring: maps keys to replicas, alike in every process, and moves few keys when replicas change.

Each name has many points on a circle of 64 bits; a key belongs to the name of the first point at or after its own
position. A new name takes over about its share of the keys; a removed name leaves only its own keys to others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from hashlib import blake2b

BITS = 64

POINTS = 100
"""Points of each name. With this number, the shares of names vary by about a tenth (1 / sqrt(POINTS))."""


def position(key: str) -> int:
    """Where a key is on the circle: 0 to 2**64 - 1, the same in every process (Python's own `hash` is not)."""
    return int.from_bytes(blake2b(key.encode(errors="surrogatepass"), digest_size=BITS // 8).digest(), "big")


class HashRing:
    """Names on the circle."""

    def __init__(self, points: int = POINTS) -> None:
        self.names: set[str] = set()
        self._points_each = points
        self._positions: list[int] = []
        self._owners: list[str] = []

    def add(self, names: Iterable[str]) -> None:
        """Put names on the circle."""
        new = set(names) - self.names
        self.names |= new
        points = list(zip(self._positions, self._owners, strict=True))
        points += [(position(f"{name}#{number}"), name) for name in new for number in range(self._points_each)]
        points.sort()
        self._positions = [place for place, _ in points]
        self._owners = [name for _, name in points]

    def remove(self, name: str) -> None:
        """Take a name off; an unknown name changes nothing."""
        if name in self.names:
            self.names.remove(name)
            left = [point for point in zip(self._positions, self._owners, strict=True) if point[1] != name]
            self._positions = [place for place, _ in left]
            self._owners = [owner for _, owner in left]

    def walk(self, start: int) -> Iterator[str]:
        """The names of the points from position `start` on, once round; a name comes once for each of its points."""
        owners = self._owners
        first = bisect_left(self._positions, start)
        for index in range(first, first + len(owners)):
            yield owners[index % len(owners)]
