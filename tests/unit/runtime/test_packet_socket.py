"""A lane's packets over a Unix socket: pieces of any size, an end that does not read, and one that breaks the rules."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.calls.channel import HandleChannel
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.edge.unix_sockets import LANE_SUFFIX
from pierhead.lane.v1.lane_pb2 import Frame, Packet
from pierhead.lanes.outbox import QUEUE_BYTES
from pierhead.lanes.packet_socket import PacketSocket, connect
from pierhead.lanes.protocol import MAX_PACKET_BYTES, LaneBrokenError
from pierhead.metrics import RuntimeMetrics

from tests.unit.runtime.harness import Cluster, address, echo, know, until
from tests.unit.runtime.pipes import idle, serve
from tests.unit.runtime.test_lane_wire import BROKEN, Ours, begin, hello

pytestmark = pytest.mark.usefixtures("cluster")  # which closes handles


class Kernel(asyncio.Transport):
    """The socket below: what was written to it, and whether it is read."""

    def __init__(self) -> None:
        self.written = b""
        self.is_read = True
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def abort(self) -> None:
        self.is_aborted = True


def connected() -> tuple[PacketSocket, Kernel]:
    socket, kernel = PacketSocket(), Kernel()
    socket.connection_made(kernel)
    return socket, kernel


async def written(*packets: bytes) -> bytes:
    socket, kernel = connected()
    for packet in packets:
        await socket.write(packet)
    return kernel.written


@given(packets=st.lists(st.binary(max_size=40), max_size=8), cuts=st.lists(st.integers(0, 400)), rest=st.integers(0, 3))
def test_packets_arrive_whole_however_the_kernel_cuts_them(packets: list[bytes], cuts: list[int], rest: int) -> None:
    async def act() -> None:
        raw = await written(*packets) + bytes(rest)
        socket, _ = connected()
        for start, end in itertools.pairwise([0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]):
            socket.data_received(raw[start:end])
        socket.connection_lost(None)
        assert [await socket.read() for _ in packets] == packets
        assert await socket.read() is grpc.aio.EOF, "a packet that is cut off is none"

    asyncio.run(act())


async def test_a_packet_above_the_bound_is_not_waited_for() -> None:
    socket, kernel = connected()
    socket.data_received(await written(b"one") + (MAX_PACKET_BYTES + 1).to_bytes(4))
    assert kernel.is_aborted
    assert await socket.read() == b"one"
    with pytest.raises(LaneBrokenError, match="4194305 bytes; at most 4194304"):
        await socket.read()


async def test_what_nobody_reads_stays_with_its_sender() -> None:
    socket, kernel = connected()
    raw = await written(bytes(QUEUE_BYTES // 2))
    for _ in range(2):
        socket.data_received(raw)
        assert kernel.is_read
    socket.data_received(raw)
    assert not kernel.is_read
    await socket.read()
    assert kernel.is_read


async def test_a_writer_waits_for_the_other_side_until_it_reads_or_is_gone() -> None:
    socket, _ = connected()
    for goes_on in (socket.resume_writing, functools.partial(socket.connection_lost, None)):
        socket.pause_writing()
        writing = asyncio.ensure_future(socket.write(b"more"))
        await asyncio.sleep(0)
        assert not writing.done()
        goes_on()
        await writing
    with pytest.raises(ConnectionError):
        await socket.write(b"more")


async def opened(where: str) -> PacketSocket:
    socket = await connect(where)
    assert socket is not None
    await socket.write(hello().SerializeToString())
    assert isinstance(await socket.read(), bytes)
    return socket


@pytest.mark.parametrize("name", BROKEN)
async def test_a_rule_broken_at_a_socket_ends_that_lane_and_nothing_else(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    _, service, server = await serve(cluster, socket=str(tmp_path / "1"), max_ongoing_requests=1000)
    service.gate.clear()
    packet, reason = BROKEN[name]
    good, bad = await opened(address(server)), await opened(address(server))
    await good.write(Packet(frames=[begin(message=b"survives", has_message=True)]).SerializeToString())
    caplog.set_level(logging.ERROR, "pierhead")
    await bad.write(packet if isinstance(packet, bytes) else packet.SerializeToString())
    while await bad.read() is not grpc.aio.EOF:
        pass
    await until(lambda: reason in caplog.text, "it is logged")
    await until(lambda: server.readiness().ongoing == 1, "only the good lane's call is in flight")
    service.gate.set()
    raw = await good.read()
    assert isinstance(raw, bytes)
    assert [(frame.kind, frame.message) for frame in Packet.FromString(raw).frames] == [(Frame.END, b"survives")]
    for each in (good, bad):
        each.cancel()
    await idle(server)


async def test_who_never_says_hello_is_not_kept(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pierhead.lanes.server.HELLO_TIMEOUT_S", 0.05)
    _, _, server = await serve(cluster, socket=str(tmp_path / "1"))
    socket = await connect(address(server))
    assert socket is not None
    assert await socket.read() is grpc.aio.EOF


async def test_a_replica_without_such_a_socket_has_its_lanes_where_its_requests_are(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As one of an earlier runtime."""
    server = await cluster.start(Ours(), socket=str(tmp_path / "1"))
    (tmp_path / f"1{LANE_SUFFIX}").unlink()
    know(server)
    stub: Any = EchoStub(HandleChannel("echo-child", metrics=RuntimeMetrics()))
    assert (await stub.Echo(echo())).response == "by a lane"


async def test_the_callers_are_gone_before_a_replica_that_ends(cluster: Cluster, tmp_path: Path) -> None:
    """Their packets are not waited for."""
    stub, _, server = await serve(cluster, socket=str(tmp_path / "1"))
    assert await stub.One(b"hi") == b"hi"
    lane = await opened(address(server))
    lane.cancel()
    async with asyncio.timeout(0.9):  # less than GOODBYE_S
        await cluster.drained(server)
