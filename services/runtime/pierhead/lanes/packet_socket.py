"""A lane's packets over a Unix socket of their own: the length of each, four bytes, big-endian, and then the packet.

On one machine a packet by gRPC costs each side 0.1 ms of CPU time, and by a socket 0.015 (docs/decisions/calls.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import cast

import grpc

from pierhead.edge.unix_sockets import LANE_SUFFIX
from pierhead.lanes.outbox import QUEUE_BYTES
from pierhead.lanes.protocol import MAX_PACKET_BYTES, LaneBrokenError
from pierhead.lanes.window import MESSAGE_BYTES
from pierhead.tasks import wake

_LENGTH_BYTES = 4


async def connect(address: str) -> PacketSocket | None:
    """Connect to the lanes of the replica at `unix:<path>`; None where it has no such socket. Raises OSError."""
    if not address.startswith("unix:"):
        return None
    loop, path = asyncio.get_running_loop(), address.removeprefix("unix:") + LANE_SUFFIX
    try:
        _, connected = await loop.create_unix_connection(PacketSocket, path)
    except FileNotFoundError:
        return None
    return connected


class PacketSocket(asyncio.Protocol):
    """One end. It reads and writes as gRPC's streams do."""

    def __init__(self, accepted: Callable[[PacketSocket], None] = lambda _: None) -> None:
        """`accepted` is called once it is connected."""
        self._accepted = accepted
        self._transport: asyncio.Transport
        self._rest = bytearray()
        """The beginning of a packet that has not arrived whole."""
        self._packets: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        """It waits until the other side has read more."""
        self._is_full = False
        self._is_over = False
        self._broken: LaneBrokenError | None = None

    async def read(self) -> bytes | object:
        """The next packet; `grpc.aio.EOF` at the end. Raises LaneBrokenError."""
        while not self._packets:
            if self._broken is not None:
                raise self._broken
            if self._is_over:
                return grpc.aio.EOF
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        packet = self._packets.popleft()
        self._count(-len(packet) - MESSAGE_BYTES)
        return packet

    def _count(self, size: int) -> None:
        """More, or fewer, bytes wait to be read here: above a bound they stay with their sender."""
        before, self._waiting_bytes = self._waiting_bytes, self._waiting_bytes + size
        if before <= QUEUE_BYTES < self._waiting_bytes:
            self._transport.pause_reading()
        elif self._waiting_bytes <= QUEUE_BYTES < before:
            self._transport.resume_reading()

    async def write(self, packet: bytes) -> None:
        """Send a packet; return when there is room for another. Raises ConnectionError where nothing of it is sent."""
        if self._is_over or self._transport.is_closing():
            raise ConnectionResetError("the other side of the lane is gone")
        self._transport.write(len(packet).to_bytes(_LENGTH_BYTES) + packet)
        while self._is_full and not self._is_over:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer

    async def finish(self, within_s: float) -> None:
        """Send what was written, and wait until the other side has read it and ends it, too; at most that long."""
        if not self._is_over:
            self._transport.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while await self.read() is not grpc.aio.EOF:
                    pass

    def cancel(self) -> None:
        """End it now."""
        self._transport.abort()

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is connected."""
        self._transport = cast("asyncio.Transport", transport)
        self._accepted(self)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived: pieces of packets."""
        rest = self._rest
        rest += data
        at = 0
        while (begin := at + _LENGTH_BYTES) <= len(rest):
            length = int.from_bytes(rest[at:begin])
            if length > MAX_PACKET_BYTES:
                self._broken = LaneBrokenError(f"a packet of {length} bytes; at most {MAX_PACKET_BYTES} are taken")
                self._transport.abort()
                break
            if begin + length > len(rest):
                break
            at = begin + length
            self._packets.append(bytes(rest[begin:at]))
            self._count(length + MESSAGE_BYTES)
        del rest[:at]
        wake(self._reader)

    def pause_writing(self) -> None:
        """The other side reads more slowly than this one writes."""
        self._is_full = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._is_full = False
        wake(self._writer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing arrives any more."""
        self._is_over = True
        wake(self._reader)
        wake(self._writer)
