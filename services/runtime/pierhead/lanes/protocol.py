"""The rules that both sides of a lane check."""

from __future__ import annotations

from pierhead.lane.v1.lane_pb2 import Packet

MAX_PACKET_BYTES = 4 * 1024 * 1024
"""A larger packet ends the lane."""


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
