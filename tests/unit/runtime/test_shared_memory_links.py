"""A replica whose callers break the rules of shared memory: real sockets, real memfds, and nothing is torn or kept."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import itertools
import mmap
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from pierhead import tensors
from pierhead.lane.v1.lane_pb2 import MemoryQuestion
from pierhead.lane.v1.lane_pb2_grpc import LaneStub
from pierhead.memory.link import _ENTRY, LEND, REGION, RELEASED
from pierhead.memory.link_setup import HELLO, MAX_WAITING
from pierhead.memory.regions import SEALS, OwnMemory, receive
from pierhead.memory.sharing import LINK_KEY
from pierhead.tensor.v1.tensor_pb2 import Tensor

from tests.unit.runtime.harness import Cluster, until
from tests.unit.runtime.tensor_pipes import TensorsStub, held, tensors_replica

SHRINK, FUTURE_WRITE = 0x2, 0x10
SIZE = 256 * 1024
NAMES: Iterator[bytes] = (number.to_bytes(16) for number in itertools.count(1))


def region(seals: int = SEALS) -> int:
    """The descriptor of a memfd full of ones."""
    fd = os.memfd_create("region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, np.ones(SIZE // 4, np.float32).tobytes())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Caller:
    """Speaks to a replica by the rules, or not: its own socket, and plain gRPC."""

    def __init__(self, directory: Path, port: int) -> None:
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.directory = directory

    async def meet(self) -> None:
        """Open a new link in place of the former one."""
        stub: Any = LaneStub(self.channel)
        name = (await stub.FindMemory(MemoryQuestion())).name
        self.token = os.urandom(16)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        self.socket.connect(str(self.directory / name))
        self.socket.send(HELLO + self.token)
        assert await self.read() == HELLO

    async def read(self) -> bytes:
        """The next packet of the replica; empty = it has closed the link."""
        return await asyncio.to_thread(self.socket.recv, 4096)

    def give(self, name: bytes, fd: int, size: int = SIZE) -> None:
        """Pass a region."""
        socket.send_fds(self.socket, [REGION + _ENTRY.pack(name, size, 0)], [fd])
        os.close(fd)

    async def send(self, name: bytes, generation: int = 1, length: int = SIZE, numbers: int = SIZE // 4) -> Any:
        """The extremes of a tensor in a region, as the replica has read them. Raises AioRpcError."""
        request = Tensor(dtype=tensors.FLOAT32, shape=[numbers])
        request.shared.region, request.shared.generation, request.shared.length = name, generation, length
        keep = TensorsStub(self.channel).Keep
        await keep(request, metadata=((LINK_KEY, self.token.hex()),), timeout=20)
        return tensors.to_numpy(await keep(Tensor())).tolist()

    async def is_served(self) -> bool:
        """Whether a right region is read."""
        name = next(NAMES)
        self.give(name, region())
        return bool(await self.send(name) == [[1, 1]])

    async def ended(self) -> bool:
        """Whether the replica has ended the link; opens a new one."""
        with self.socket:
            found = await self.read()
        await self.meet()
        return found == b""

    async def close(self) -> None:
        self.socket.close()
        await self.channel.close()


@pytest.fixture
async def caller(cluster: Cluster, tmp_path: Path, free_port: int) -> AsyncIterator[Caller]:
    replica = await tensors_replica(cluster, free_port, tmp_path)
    made = Caller(tmp_path, free_port)
    await made.meet()
    yield made
    assert await made.is_served(), "the replica lives on"
    await made.close()
    await until(lambda: held(replica.pid) == (0, 0), "the replica has given everything back")


async def test_each_caller_has_a_socket_of_its_own_which_is_gone_when_it_has_connected(caller: Caller) -> None:
    """Another process of the same user can replace a file that it finds."""
    assert list(caller.directory.iterdir()) == []
    stub: Any = LaneStub(caller.channel)
    names = {(await stub.FindMemory(MemoryQuestion())).name for _ in range(MAX_WAITING + 1)}
    left = {path.name for path in caller.directory.iterdir()}
    assert (len(names), len(left), left < names) == (MAX_WAITING + 1, MAX_WAITING, True)
    await until(lambda: not list(caller.directory.iterdir()), "those to which nobody connects are removed")


async def test_a_packet_that_breaks_the_rules_ends_the_link(caller: Caller) -> None:
    regions: dict[str, tuple[int, int]] = {
        "no seals": (region(seals=0), SIZE),
        "can be made smaller": (region(SEALS & ~SHRINK), SIZE),
        "can be written": (region(SEALS & ~FUTURE_WRITE), SIZE),
        "no memfd": (os.open("/usr", os.O_RDONLY), SIZE),
        "announced larger": (region(), SIZE + 1),
        "announced smaller": (region(), SIZE - 1),
        "announced as empty": (region(), 0),
    }
    for case, (fd, size) in regions.items():
        name = next(NAMES)
        caller.give(name, fd, size)
        with pytest.raises(grpc.aio.AioRpcError, match=r"content of a tensor in|none is shared") as refused:
            await caller.send(name)
        assert refused.value.code() is grpc.StatusCode.INTERNAL, case
        assert await caller.ended(), case
    for packet in (REGION + b"short", RELEASED + b"short", b"?" + bytes(32)):
        caller.socket.send(packet)
        assert await caller.ended(), packet


async def test_a_tensor_that_names_other_content_is_refused(caller: Caller) -> None:
    name = next(NAMES)
    caller.give(name, region())
    assert await caller.send(name, generation=3) == [[1, 1]]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("was not given the region", {"name": bytes(16)}),
        ("was not given the region", {"name": b"short"}),
        ("do not fit into the region", {"length": SIZE + 4, "numbers": SIZE // 4 + 1}),
        ("do not fit into the region", {"length": 2**63, "numbers": 2**61}),
        ("was released", {"generation": 2}),
        ("expected .* bytes", {"numbers": SIZE}),
    ]
    for why, tensor in cases:
        request: dict[str, Any] = {"name": name, "generation": 4} | tensor
        with pytest.raises(grpc.aio.AioRpcError, match=why):
            await caller.send(**request)


async def test_what_was_passed_and_never_named_goes_with_its_sender(caller: Caller) -> None:
    """As when a sender is killed while it writes."""
    for _ in range(20):
        caller.give(next(NAMES), region())
    assert await caller.is_served()
    caller.socket.close()
    await caller.meet()


async def test_a_connection_that_no_call_expects_is_closed(caller: Caller) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(caller.socket, [LEND + _ENTRY.pack(b"", 7, 0)], [theirs.fileno()])
        theirs.close()
        assert await asyncio.to_thread(ours.recv, 1) == b""
    caller.socket.send(LEND + _ENTRY.pack(b"", 7, 0))


def test_a_receiver_can_neither_change_a_region_nor_make_it_smaller() -> None:
    own = OwnMemory(SIZE)
    own.view(SIZE)[:] = b"x" * SIZE
    fd = os.dup(own.fd)
    path, punch_hole = f"/proc/self/fd/{fd}", 0x3
    libc = ctypes.CDLL(None, use_errno=True)
    attempts: list[Callable[[], object]] = [
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 2 * SIZE),
        lambda: os.pwrite(fd, b"y", 0),
        lambda: os.truncate(path, 0),
        lambda: os.open(path, os.O_RDWR | os.O_TRUNC),
        lambda: mmap.mmap(fd, SIZE),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x8),
    ]
    for attempt in attempts:
        with pytest.raises(PermissionError):
            attempt()
    assert libc.fallocate(fd, punch_hole, ctypes.c_long(0), ctypes.c_long(SIZE)) == -1
    read = receive(fd, SIZE)
    with pytest.raises(TypeError, match="read-only"):
        read.view(SIZE)[:1] = b"y"
    own.close()  # and its memory stays for as long as it is mapped
    assert bytes(read.view(SIZE)) == b"x" * SIZE
