"""An event loop in which waiting costs nothing: when everybody waits, the clock jumps to the next timer.

For worlds in memory only: nothing outside the process moves while the clock jumps. A test is run on it by the marker
`virtual_time` (tests/unit/conftest.py); `wall_clock` is then the clock to hand to what it tests.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Mapping
from typing import Any


class _Selector(selectors.BaseSelector):
    """Looks at files without waiting for them, and tells how long it should have waited."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("everybody waits, and nothing is due: this would wait forever")
            self.passed_s += max(timeout, 0.0)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is seconds of virtual time."""

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._waits.passed_s


_BEGAN = 1_700_000_000.0


def wall_clock() -> float:
    """`time.time()`; where a virtual loop runs, a time of day that advances with that loop's time."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # outside of any
        return time.time()
    return _BEGAN + loop.time() if isinstance(loop, VirtualLoop) else time.time()
