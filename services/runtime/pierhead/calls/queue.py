"""The line of calls that wait for a replica with room: the oldest call is served first.

Age and not arrival decides, so that a refused call returns to its former place. Pure: the pool decides which call is
served, and when.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pierhead.calls.lease import CallPlace
    from pierhead.policies.router import PolicyRouter


@dataclass(slots=True, eq=False)
class QueuePlace:
    """One call's place in the queue. Either `granted` or `denied` is called, once, unless the call leaves first."""

    age: float
    call: Any
    router: PolicyRouter
    granted: Callable[[CallPlace], None]
    denied: Callable[[Exception], None]
    waits: bool = False


class CallQueue:
    """Places, ordered by age; ties in age go by arrival order."""

    def __init__(self) -> None:
        self.waiting = 0
        """Places in the queue. Places that have left do not count; the heap drops them later."""
        self._heap: list[tuple[float, int, QueuePlace]] = []
        self._joined = 0

    def join(self, place: QueuePlace) -> None:
        """Join the queue."""
        place.waits = True
        self.waiting += 1
        self._joined += 1
        heapq.heappush(self._heap, (place.age, self._joined, place))

    def leave(self, place: QueuePlace) -> bool:
        """Leave the queue, from anywhere in it. False when it had left before."""
        if not place.waits:
            return False
        place.waits = False
        self.waiting -= 1
        if len(self._heap) > 2 * self.waiting + 16:  # so that leaving costs amortised constant time
            self._heap = [entry for entry in self._heap if entry[2].waits]
            heapq.heapify(self._heap)
        return True

    def head(self) -> QueuePlace | None:
        """The place whose turn it is."""
        while self._heap and not self._heap[0][2].waits:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
