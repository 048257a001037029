"""The store itself, in the memory of one process: the controller's, or one that has no controller."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pierhead.errors import StoreUnavailable
from pierhead.store.bounds import LARGEST_NUMBER, MOST_BYTES, MOST_KEYS, check_keys, check_ttl, check_values, size_of


class Store(Protocol):
    """A store, here or at the controller. Raises ValueError for what is out of bounds, else StoreUnavailable."""

    async def get(self, keys: Sequence[str]) -> dict[str, str]:
        """The values of those keys that exist."""
        ...

    async def set(self, values: Mapping[str, str], ttl_s: float) -> None:
        """Set all keys or, where an error is raised, none."""
        ...

    async def incr(self, key: str, by: int, ttl_s: float) -> int:
        """Add to a whole number, 0 where the key does not exist; returns the sum."""
        ...


class _Entry(NamedTuple):
    value: str
    until: float


class MemoryStore:
    """Keys with a time to live. May be used by several threads: no method awaits anything."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, most_keys: int = MOST_KEYS, most_bytes: int = MOST_BYTES
    ) -> None:
        self._clock = clock
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._bytes = 0
        self._ends: list[tuple[float, str]] = []
        """A heap of when keys expire. A key that is set again leaves its former entry behind."""

    @property
    def kept(self) -> int:
        """Keys in memory, some of which may have expired."""
        return len(self._entries)

    async def get(self, keys: Sequence[str]) -> dict[str, str]:
        """See Store."""
        check_keys(keys)
        with self._lock:
            now = self._clock()
            found = ((key, self._entries.get(key)) for key in keys)
            return {key: entry.value for key, entry in found if entry is not None and now < entry.until}

    async def set(self, values: Mapping[str, str], ttl_s: float) -> None:
        """See Store."""
        check_values(values, ttl_s)
        with self._lock:
            self._set(values, ttl_s)

    async def incr(self, key: str, by: int, ttl_s: float) -> int:
        """See Store."""
        check_keys([key])
        check_ttl(ttl_s)
        with self._lock:
            entry = self._entries.get(key)
            value = entry.value if entry is not None and self._clock() < entry.until else "0"
            try:
                number = int(value) + by
            except ValueError:
                found = repr(value[:60])
                raise ValueError(f"shared store: {key}: expected a whole number to add to, found {found}") from None
            if abs(number) > LARGEST_NUMBER:
                raise ValueError(f"shared store: {key}: expected a sum of at most {LARGEST_NUMBER}, found {number}")
            self._set({key: str(number)}, ttl_s)
            return number

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._ends.clear()
            self._bytes = 0

    def _set(self, values: Mapping[str, str], ttl_s: float) -> None:
        now = self._clock()
        self._expire(now)
        until = now + ttl_s
        keys = len(self._entries) + sum(key not in self._entries for key in values)
        size = self._bytes + sum(_size(key, value) for key, value in values.items())
        size -= sum(_size(key, self._entries[key].value) for key in values if key in self._entries)
        if keys > self._most_keys or size > self._most_bytes:
            raise StoreUnavailable(
                f"shared store: full: it keeps at most {self._most_keys} keys and {self._most_bytes} bytes, and would "
                f"have {keys} and {size}; set fewer keys, or a shorter ttl_s"
            )
        self._bytes = size
        for key, value in values.items():
            self._entries[key] = _Entry(value, until)
            heapq.heappush(self._ends, (until, key))
        if len(self._ends) > 2 * len(self._entries) + 16:  # so that setting a key costs amortised logarithmic time
            self._ends = [(entry.until, key) for key, entry in self._entries.items()]
            heapq.heapify(self._ends)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, key = heapq.heappop(self._ends)
            entry = self._entries.get(key)
            if entry is not None and entry.until == until:
                self._bytes -= _size(key, entry.value)
                del self._entries[key]


OWN_STORE = MemoryStore()


def _size(key: str, value: str) -> int:
    return size_of(key) + size_of(value)
