"""What carries a lane's packets, and the rules that both sides check."""

from __future__ import annotations

from typing import Any, Protocol

from pierhead.lane.v1.lane_pb2 import Packet

MAX_PACKET_BYTES = 4 * 1024 * 1024
"""A larger packet ends the lane."""

HELLO_TIMEOUT_S = 5.0
"""How long the other side may take for its hello once there is a stream; then it counts as lost."""


class Stream(Protocol):
    """What carries packets in both directions: a gRPC stream, a Unix socket, or nothing within a process."""

    async def read(self) -> Any:
        """The next packet as bytes; `grpc.aio.EOF` at the end."""

    async def write(self, packet: bytes) -> Any:
        """Send a packet; return when there is room for another."""


class LaneBrokenError(Exception):
    """The other side broke a rule of the protocol, which the message names. Only the lane ends."""


def parse_packet(raw: bytes, largest: int = MAX_PACKET_BYTES) -> Packet:
    """The packet. Raises LaneBrokenError."""
    if len(raw) > largest:
        raise LaneBrokenError(f"a packet of {len(raw)} bytes; at most {largest} are taken")
    try:
        return Packet.FromString(raw)
    except Exception as error:
        raise LaneBrokenError(f"{len(raw)} bytes that are no packet") from error
