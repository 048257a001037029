"""A lane's packets over a Unix socket: pieces of any size, an end that does not read, and one that breaks the rules."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead import NoReplica
from pierhead.calls.channel import HandleChannel
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.edge.unix_sockets import LANE_SUFFIX
from pierhead.lane.v1.lane_pb2 import Frame, LaneName, Packet
from pierhead.lane.v1.lane_pb2_grpc import LaneStub
from pierhead.lanes.outbox import QUEUE_BYTES, Outbox
from pierhead.lanes.packet_socket import PacketSocket, connect
from pierhead.lanes.protocol import MAX_PACKET_BYTES, LaneBrokenError
from pierhead.lanes.window import MESSAGE_BYTES
from pierhead.metrics import RuntimeMetrics

from tests.unit.runtime.harness import Cluster, EchoService, address, echo, know, until
from tests.unit.runtime.pipes import idle, serve
from tests.unit.runtime.test_lane_wire import BROKEN, Ours, begin, caller, hello

pytestmark = pytest.mark.usefixtures("cluster")  # which closes handles


class Kernel(asyncio.Transport):
    """The socket below: what was written to it, and how often it was told not to be read."""

    def __init__(self) -> None:
        self.written = b""
        self.held = 0
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.held += 1

    def resume_reading(self) -> None:
        self.held -= 1

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


def connected() -> tuple[PacketSocket, Kernel]:
    stream, kernel = PacketSocket(), Kernel()
    stream.connection_made(kernel)
    return stream, kernel


async def written(*packets: bytes) -> bytes:
    stream, kernel = connected()
    for packet in packets:
        await stream.write(packet)
    return kernel.written


@given(packets=st.lists(st.binary(max_size=40), max_size=8), cuts=st.lists(st.integers(0, 400)), rest=st.integers(0, 3))
def test_packets_arrive_whole_however_the_kernel_cuts_them(packets: list[bytes], cuts: list[int], rest: int) -> None:
    async def act() -> None:
        raw = await written(*packets) + bytes(rest)
        stream, _ = connected()
        for start, end in itertools.pairwise([0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]):
            stream.data_received(raw[start:end])
        stream.connection_lost(None)
        assert [await stream.read() for _ in packets] == packets
        assert await stream.read() is grpc.aio.EOF, "a packet that is cut off is none"

    asyncio.run(act())


async def test_a_packet_above_the_bound_is_not_waited_for() -> None:
    stream, kernel = connected()
    stream.data_received(await written(b"one") + (MAX_PACKET_BYTES + 1).to_bytes(4))
    assert kernel.is_aborted
    assert await stream.read() == b"one"
    with pytest.raises(LaneBrokenError, match="4194305 bytes; at most 4194304"):
        await stream.read()


async def test_a_packet_for_a_connection_that_closes_is_refused() -> None:
    stream, kernel = connected()
    stream.cancel()
    with pytest.raises(ConnectionResetError):
        await stream.write(b"one")
    assert kernel.written == b""


@pytest.mark.parametrize("size", [0, 1000, QUEUE_BYTES // 2])
async def test_what_nobody_reads_stays_with_its_sender(size: int) -> None:
    stream, kernel = connected()
    raw, count = await written(bytes(size)), QUEUE_BYTES // (size + MESSAGE_BYTES)
    stream.data_received(raw * count)
    assert kernel.held == 0
    stream.data_received(raw)
    assert kernel.held == 1, "also where they are empty"
    await stream.read()
    assert kernel.held == 0


async def test_a_writer_waits_for_the_other_side_until_it_reads_or_is_gone() -> None:
    stream, _ = connected()
    for goes_on in (stream.resume_writing, functools.partial(stream.connection_lost, None)):
        stream.pause_writing()
        writing = asyncio.ensure_future(stream.write(b"more"))
        await asyncio.sleep(0)
        assert not writing.done()
        goes_on()
        await writing
    with pytest.raises(ConnectionError):
        await stream.write(b"more")


async def opened(where: str) -> PacketSocket:
    stream = await connect(where)
    assert stream is not None
    await stream.write(hello().SerializeToString())
    assert isinstance(await stream.read(), bytes)
    return stream


async def heard(stream: PacketSocket) -> Packet:
    raw = await stream.read()
    assert isinstance(raw, bytes)
    return Packet.FromString(raw)


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
    assert [(frame.kind, frame.message) for frame in (await heard(good)).frames] == [(Frame.END, b"survives")]
    for each in (good, bad):
        each.cancel()
    await idle(server)


async def test_who_never_says_hello_or_leaves_with_it_is_not_kept(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pierhead.lanes.server.HELLO_TIMEOUT_S", 0.05)
    _, _, server = await serve(cluster, socket=str(tmp_path / "1"))
    silent, leaving, quick = [await connect(address(server)) for _ in range(3)]
    assert silent is not None
    assert leaving is not None
    assert quick is not None
    leaving.cancel()
    await quick.write(hello().SerializeToString())
    quick.cancel()
    for each in (silent, leaving, quick):
        assert await each.read() is grpc.aio.EOF
    lanes: Any = server._lanes
    await until(lambda: len(lanes._socket_tasks) == 1, "the handle's own stays")
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("left", [False, True], ids=["none", "one of a process that has ended"])
async def test_a_replica_without_such_a_socket_has_its_lanes_where_its_requests_are(
    cluster: Cluster, tmp_path: Path, left: bool
) -> None:
    """As one of an earlier runtime."""
    server = await cluster.start(Ours(), socket=str(tmp_path / "1"))
    lanes = tmp_path / f"1{LANE_SUFFIX}"
    lanes.unlink()
    if left:
        with socket.socket(socket.AF_UNIX) as former:
            former.bind(str(lanes))
    know(server)
    stub: Any = EchoStub(HandleChannel("echo-child", metrics=RuntimeMetrics()))
    assert (await stub.Echo(echo(), timeout=10)).response == "by a lane"


async def test_a_replica_whose_loop_greets_and_that_answers_nothing_else_is_not_called(tmp_path: Path) -> None:
    def greet(stream: PacketSocket) -> None:
        greeting = stream.write(hello().SerializeToString())
        greetings.append(asyncio.ensure_future(greeting))

    greetings: list[asyncio.Future[None]] = []
    path = str(tmp_path / "1")
    async with await asyncio.get_running_loop().create_unix_server(lambda: PacketSocket(greet), path + LANE_SUFFIX):
        with pytest.raises(NoReplica):
            await caller(f"unix:{path}").One(b"1", timeout=0.5)
    assert greetings


async def test_a_lane_ends_with_the_call_that_accompanies_it(cluster: Cluster, tmp_path: Path) -> None:
    """gRPC ends that when the caller hangs."""
    _, service, server = await serve(cluster, socket=str(tmp_path / "1"))
    service.gate.clear()
    lane = await connect(address(server))
    assert lane is not None
    greeting = hello(frames=[begin(message=b"it waits")])
    await lane.write(greeting.SerializeToString())
    assert (await heard(lane)).HasField("hello")
    async with grpc.aio.insecure_channel(address(server)) as channel:
        stub: Any = LaneStub(channel)
        company = stub.Accompany(LaneName(lane=greeting.hello.lane))
        await company.read()
        await until(lambda: server.readiness().ongoing == 1, "its call is in flight")
        company.cancel()
        await idle(server)
        assert await lane.read() is grpc.aio.EOF
        nowhere = stub.Accompany(LaneName(lane=b"another"))
        assert await nowhere.code() is grpc.StatusCode.NOT_FOUND


async def test_a_lane_that_nothing_accompanies_is_not_kept(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller has hung after the hello."""
    monkeypatch.setattr("pierhead.lanes.server.HELLO_TIMEOUT_S", 0.5)
    server = await cluster.start(EchoService(), socket=str(tmp_path / "1"))
    lane = await opened(address(server))
    assert await lane.read() is grpc.aio.EOF


async def test_a_replica_that_says_goodbye_takes_what_its_caller_sends_until_that_has_read_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A socket that is closed for writing, too, would lose the goodbye of a caller that is about to write."""
    _, _, server = await serve(cluster, socket=str(tmp_path / "1"))
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.setblocking(False)
        await loop.sock_connect(raw, address(server).removeprefix("unix:") + LANE_SUFFIX)
        await loop.sock_sendall(raw, await written(hello().SerializeToString()))
        await loop.sock_recv(raw, 1000)
        ended = asyncio.ensure_future(cluster.drained(server))
        goodbye = Packet.FromString((await loop.sock_recv(raw, 1000))[4:])
        assert goodbye.HasField("goodbye")
        assert await loop.sock_recv(raw, 1000) == b""
        await loop.sock_sendall(raw, await written(Packet(frames=[begin()]).SerializeToString()))
    await ended


async def test_what_is_queued_for_a_caller_that_has_gone_is_not_waited_for() -> None:
    async def write(_: bytes) -> None:
        raise ConnectionResetError

    outbox = Outbox()
    outbox.packet().goodbye.last_call = 1
    with pytest.raises(ConnectionResetError):
        await outbox.write_all(write)
    drained = asyncio.ensure_future(outbox.drained())
    await asyncio.sleep(0)
    assert not drained.done()
    outbox.discard()
    await drained
