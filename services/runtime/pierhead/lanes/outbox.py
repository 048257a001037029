"""The queue of frames that one side of a lane sends. One writer sends all queued frames, a packet at a time.

The first frame wakes the writer, which runs in the same turn of the event loop or the next. Frames that are added until
then go into the same packet. While a packet is written, the next one fills. Replies of streams are paced: within PACE_S
of the last packet they wait for others, so that many of them share a packet, and those of one stream a write to its
client. No other frame waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from pierhead.lane.v1.lane_pb2 import Packet
from pierhead.tasks import next_change, wake, wake_all

PACKET_BYTES = 512 * 1024
"""A packet with this many bytes is closed: with one more message it stays well below protocol.MAX_PACKET_BYTES."""

QUEUE_BYTES = 4 * 1024 * 1024
"""While more bytes than this wait to be written, a replica reads no further frames from that caller."""

PACE_S = 0.001
"""The longest that a paced frame waits, in seconds."""

_FRAME_BYTES = 48
"""Approximate bytes of a frame besides its message."""


class Outbox:
    """The frames of one side."""

    def __init__(self) -> None:
        self.latest = 0
        """The number of the last call that was begun; the caller's side sets it."""
        self.sent = 0
        """`latest` when the last packet was closed: calls above this number were never sent."""
        self._closed: deque[tuple[Packet, int, int]] = deque()
        self._packet = Packet()
        self._frames: Any = self._packet.frames
        self._bytes = 0
        self._closed_bytes = 0
        self._due = 0.0
        self._alarm = False
        """Whether the writer will be woken then."""
        self._ready = False
        self._wake: asyncio.Future[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._writing = False

    def frames(self, size: int = 0, *, paced: bool = False) -> Any:
        """The frames to `add(...)` one frame to, before anything else runs; `size`: bytes of its message."""
        if self._bytes > PACKET_BYTES:
            self._next_packet()
            paced = False
        self._bytes += size + _FRAME_BYTES
        if not (paced and self._waits()):
            self._write_now()
        return self._frames

    def _waits(self) -> bool:
        """Whether a paced frame has to wait; wakes the writer in time."""
        loop = asyncio.get_running_loop()
        if not self._alarm and (early := self._due - loop.time()) > 0:
            self._alarm = True
            loop.call_later(early, self._ring)
        return self._alarm

    def _ring(self) -> None:
        self._alarm = False
        if self._bytes:
            self._write_now()

    def _write_now(self) -> None:
        self._ready = True
        waiter, self._wake = self._wake, None
        if waiter is not None:
            wake(waiter)

    def packet(self) -> Packet:
        """The packet that is being filled, for its fields besides frames."""
        self.frames()
        return self._packet

    @property
    def queued(self) -> int:
        """Bytes that wait to be written."""
        return self._closed_bytes + self._bytes

    async def room(self) -> None:
        """Return once no more than QUEUE_BYTES wait."""
        while self.queued > QUEUE_BYTES:
            await next_change(self._waiters)

    async def drained(self) -> None:
        """Return once all that was queued has been handed to what carries it."""
        while self._writing or self.queued:
            await next_change(self._waiters)

    async def write_all(self, write: Callable[[bytes], Awaitable[Any]]) -> None:
        """Send everything that is queued, now and later; ends only when `write` raises, or by cancellation. `write`
        raises ConnectionError only for a packet of which nothing was written.
        """
        loop = asyncio.get_running_loop()
        while True:
            if not self._ready:
                self._writing = False
                wake_all(self._waiters)
                self._wake = loop.create_future()
                await self._wake
            self._writing = True
            if not self._closed:
                self._next_packet()
            before = self.sent
            packet, size, self.sent = self._closed.popleft()
            self._closed_bytes -= size
            self._ready = bool(self._closed or self._bytes)
            self._due = loop.time() + PACE_S
            try:
                await write(packet.SerializeToString())
            except ConnectionError:  # nothing of it was written
                self.sent = before
                raise
            wake_all(self._waiters)

    def discard(self) -> None:
        """Forget what is queued, as the other side is gone: `drained` and `room` return."""
        self._closed.clear()
        self._packet = Packet()
        self._frames = self._packet.frames
        self._bytes = self._closed_bytes = 0
        self._writing = False
        wake_all(self._waiters)

    def _next_packet(self) -> None:
        self._closed.append((self._packet, self._bytes, self.latest))
        self._closed_bytes += self._bytes
        self._packet = Packet()
        self._frames = self._packet.frames
        self._bytes = 0
