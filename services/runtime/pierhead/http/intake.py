"""Limits how many requests one turn of the event loop accepts while requests are being refused.

A turn with a thousand readable sockets handles a thousand requests before anything else: replies that calls wait for,
the next call of the line, a health probe. When nearly all of these requests are refused, each turn spends its time on
refusals, and accepted work advances by one step per turn. So little is finished then that the next turn refuses even
more (receive livelock: Mogul and Ramakrishnan, "Eliminating Receive Livelock in an
Interrupt-driven Kernel", 1997). While there are refusals, turns are therefore kept short, and further requests wait in
order of arrival. Without refusals no request is held: long turns give full packets.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

PER_TURN = 16
"""Requests per turn: some milliseconds of refusals, about as long as a replica takes for a call."""

CALM_S = 1.0
"""After this time without a refusal, turns are unlimited again."""

UNLIMITED = sys.maxsize


class Source(Protocol):
    """A connection whose data is processed or held."""

    held: bytes

    def receive(self, data: bytes) -> None:
        """Process `data`."""
        ...

    def stop_reading(self) -> None:
        """Read no more for now."""
        ...

    def continue_reading(self) -> None:
        """Read again."""
        ...


class Intake:
    """Decides whether a connection's data is processed in this turn. Owned by one event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.left = UNLIMITED
        """How many reads may still be processed in this turn: a connection counts it down, and calls `hold` at 0."""
        self._clock = clock
        self._call_soon = call_soon or asyncio.get_running_loop().call_soon
        self._held: deque[Source] = deque()
        self._calm_at = 0.0
        self._turning = False

    def refused(self) -> None:
        """A request was refused."""
        self._calm_at = self._clock() + CALM_S
        self.left = min(self.left, PER_TURN)

    def hold(self, connection: Source, data: bytes) -> None:
        """Hold data until a later turn."""
        if connection.held:
            connection.held += data
            connection.stop_reading()  # at most one read is held per connection
        else:
            connection.held = data
            self._held.append(connection)
        if not self._turning:
            self._turning = True
            self._call_soon(self._turn)

    def _turn(self) -> None:
        held = self._held
        for _ in range(min(PER_TURN, len(held))):
            connection = held.popleft()
            data, connection.held = connection.held, b""
            connection.receive(data)
            connection.continue_reading()
        if held:
            self._call_soon(self._turn)
            return
        self._turning = False
        self.left = UNLIMITED if self._clock() >= self._calm_at else PER_TURN
