"""Many deadlines on one timer.

Nearly every request ends long before its deadline. A timer of the event loop for each would be the largest cost of a
request, and would leave the loop's heap full of cancelled entries. Here a deadline is an entry in the
slot of its time, and one timer wakes for the next slot that is not empty. A deadline fires at most one slot late, and
never early.

A slot stays until its time has come, so there must not be many: at 60 s and 200 slots a second there would be 12,000.
So deadlines far ahead share long slots. When a long slot is due, the few deadlines that are left in it move to the slot
of their time (a timing wheel of two levels: Varghese and Lauck, "Hashed and Hierarchical Timing Wheels", 1987).
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import ClassVar, TypeAlias
from weakref import WeakKeyDictionary

SLOTS_PER_S = 200
"""The loop's own timers are no more exact on a busy machine."""

SLOT_S = 1 / SLOTS_PER_S

LONG_SLOTS = 256
"""Short slots in a long one. Deadlines nearer than that go into short slots."""

LONGEST_S = 365 * 86_400.0
"""Longer times, such as infinity, count as this: clocks, slots and frames cannot hold more."""

Slot: TypeAlias = "dict[Deadline, None]"
"""The deadlines of one slot, oldest first."""


class Deadline:
    """One entry. `cancel` may be called at any time, also after it has fired."""

    __slots__ = ("_callback", "_slot", "number")

    def __init__(self, slot: Slot, number: int, callback: Callable[[], object]) -> None:
        self._slot = slot
        self.number = number
        self._callback: Callable[[], object] | None = callback
        slot[self] = None

    def cancel(self) -> None:
        """Forget it."""
        if self._callback is not None:
            self._callback = None
            del self._slot[self]

    def move(self, slot: Slot) -> None:
        """Move to another slot."""
        if self._callback is not None:
            del self._slot[self]
            self._slot = slot
            slot[self] = None

    def strike(self) -> None:
        """Call back, once."""
        callback = self._callback
        if callback is not None:
            self.cancel()
            callback()


class Deadlines:
    """The deadlines of one event loop."""

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Deadlines]] = WeakKeyDictionary()

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Does not hold the loop: this object is a value under that key, and would keep the loop alive.
        self._call_later = call_later or _call_later
        self._clock = clock
        self._slots: dict[int, Slot] = {}
        """By number; a long slot has the number of its first short one."""
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0
        self._near = 0
        """Deadlines up to this slot go into short slots. Set when the timer fires, to save reading the clock for each
        deadline: a long slot that has become due since then is emptied at once."""
        self._look()

    @classmethod
    def current(cls) -> Deadlines:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        found = cls._of_loop.get(loop)
        if found is None:
            found = cls._of_loop[loop] = cls()
        return found

    def add(self, when: float, callback: Callable[[], object]) -> Deadline:
        """Call `callback()` at `when`, in the clock's seconds, unless the deadline is cancelled first."""
        number = int(when * SLOTS_PER_S) + 1
        slot_number = number if number <= self._near else number // LONG_SLOTS * LONG_SLOTS
        return Deadline(self._slots.get(slot_number) or self._slot(slot_number), number, callback)

    def _slot(self, number: int) -> Slot:
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            heapq.heappush(self._order, number)
            if self._timer is None or number < self._next:
                self._arm()
        return slot

    def _look(self) -> float:
        now = self._clock()
        self._near = int(now * SLOTS_PER_S) + LONG_SLOTS
        return now

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = self._order[0]
        self._timer = self._call_later(max(0.0, self._next * SLOT_S - self._clock()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._look()
        try:
            # Also drops empty slots after the due ones: the timer need not wake for them.
            while self._order and (self._order[0] * SLOT_S <= now or not self._slots[self._order[0]]):
                self._empty(heapq.heappop(self._order), now)
        finally:
            if self._order:
                self._arm()

    def _empty(self, number: int, now: float) -> None:
        """Fire the due deadlines, and move the others of a long slot to short ones."""
        slot = self._slots[number]
        try:
            for deadline in list(slot):
                if deadline.number * SLOT_S <= now:
                    deadline.strike()
                else:
                    deadline.move(self._slot(deadline.number))
        finally:
            if slot:  # a callback has raised, or has added one that is due already
                heapq.heappush(self._order, number)
            else:
                del self._slots[number]


def _call_later(delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay, callback)
