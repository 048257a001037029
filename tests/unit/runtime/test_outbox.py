"""When a lane's frames are written."""

from __future__ import annotations

import asyncio

import pytest
from pierhead.lane.v1.lane_pb2 import Packet
from pierhead.lanes.outbox import PACE_S, PACKET_BYTES, Outbox

pytestmark = pytest.mark.virtual_time


async def test_replies_of_streams_share_a_packet_within_the_pace_and_no_other_frame_waits() -> None:
    loop, outbox, written = asyncio.get_running_loop(), Outbox(), list[tuple[float, list[int]]]()
    began = loop.time()

    async def write(raw: bytes) -> None:
        frames = Packet.FromString(raw).frames
        written.append((round((loop.time() - began) / PACE_S, 6), [frame.call for frame in frames]))

    async def add(*calls: int, paced: bool = True, size: int = 0) -> None:
        for call in calls:
            outbox.frames(size, paced=paced).add(call=call)
            await asyncio.sleep(PACE_S / 4)

    writer = asyncio.create_task(outbox.write_all(write))
    await add(1, 2, 3)
    assert written == [(0, [1])], "the first is sent at once"
    await add(4, 5)
    assert written[1:] == [(1, [2, 3, 4])]
    await add(6, paced=False)
    assert written[2:] == [(5 / 4, [5, 6])], "it takes along what waits"
    await add(7, size=PACKET_BYTES + 1)
    await add(8)
    assert written[3:] == [(7 / 4, [7]), (7 / 4, [8])], "a full packet is sent at once"
    await add(9)
    await outbox.drained()
    assert written[5:] == [(11 / 4, [9])]
    assert not outbox.queued
    writer.cancel()


async def test_what_was_not_written_counts_as_not_sent() -> None:
    outbox, written = Outbox(), list[bytes]()

    async def write(raw: bytes) -> None:
        if written:
            raise ConnectionResetError("the other side is gone")
        written.append(raw)

    writer = asyncio.create_task(outbox.write_all(write))
    for call in (1, 2):
        outbox.frames().add(call=call)
        outbox.latest = call
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(ConnectionResetError):
        await writer
    assert (len(written), outbox.sent) == (1, 1)
