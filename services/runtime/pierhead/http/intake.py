"""How many requests one turn of the event loop takes up while requests are being refused.

A turn in which a thousand sockets can be read handles a thousand requests before it comes to anything else: the replies
that calls wait for, the next call of the line, a health probe. When nearly all of those requests are refused, each turn
spends its time on refusals, and the work that was accepted proceeds by a step per turn. So little is done then that the
next turn refuses even more (receive livelock: Mogul and Ramakrishnan, "Eliminating Receive Livelock in an
Interrupt-driven Kernel", 1997). While there are refusals, turns are therefore kept short; what they do not take up
waits in the order of its arrival. Otherwise nothing is held: long turns make for full packets.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

PER_TURN = 16
"""Some milliseconds of refusals: about what a replica takes for a call, so the line moves as quickly as it can."""

CALM_S = 1.0
"""So long without a refusal, and turns are unlimited again."""

UNLIMITED = sys.maxsize


class Source(Protocol):
    """A connection whose data is taken up, or waits."""

    held: bytes
    """What has been read and waits; empty = nothing does."""

    def receive(self, data: bytes) -> None:
        """Take `data` up."""
        ...

    def stop_reading(self) -> None:
        """Read no more for now."""
        ...

    def go_on_reading(self) -> None:
        """Read again."""
        ...


class Intake:
    """Decides for each connection that has been read from whether its turn is now. Owned by one event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.left = UNLIMITED
        """How much may still be taken up in this turn: a connection counts it down, and calls `hold` at 0."""
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
        """Keep what was read until there is a turn for it."""
        if connection.held:
            connection.held += data
            connection.stop_reading()  # of one connection not more waits than was read at a time
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
            connection.go_on_reading()
        if held:
            self._call_soon(self._turn)
            return
        self._turning = False
        self.left = UNLIMITED if self._clock() >= self._calm_at else PER_TURN
