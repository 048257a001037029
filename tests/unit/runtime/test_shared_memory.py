"""Tensors between processes that share memory: what arrives, and what is free afterwards."""

from __future__ import annotations

import asyncio
import gc
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from aiohttp import ClientSession
from pierhead import ContentGone, ReplicaDied, Settings, UserCodeError, close_handles, handle, tensors
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.classes.handles import handle_on
from pierhead.errors import SettingsError
from pierhead.memory import process
from pierhead.memory.link_setup import SharedMemory, share_memory
from pierhead.memory.process import Memory
from pierhead.memory.scope import SCOPE, Scope
from pierhead.metrics import RuntimeMetrics
from pierhead.tensor.v1.tensor_pb2 import Tensor

from tests.harness import ports
from tests.unit.runtime.harness import Cluster, until
from tests.unit.runtime.tensor_pipes import TensorsClass, TensorsStub, held, in_place, tensors_replica

MIB = 1024 * 1024
LIMIT = 16 * MIB
SIZE = 64 * 1024
"""float32 elements of a large tensor: 256 KiB."""


class Caller:
    """This test's process: a caller that shares memory."""

    def __init__(self, cluster: Cluster, directory: Path, limit: int) -> None:
        self.cluster = cluster
        self.directory = directory
        self.metrics = RuntimeMetrics()
        settings = Settings(shared_memory_bytes=limit, shared_memory_dir=str(directory))
        self.shared: SharedMemory | None = share_memory(settings, self.metrics)
        assert process.MEMORY is not None
        self.memory: Memory = process.MEMORY
        assert self.shared is not None
        self.keeper = asyncio.get_running_loop().create_task(self.shared.keep())

    async def replica(self, name: str = "tensors", **environ: str) -> asyncio.subprocess.Process:
        """A replica in a process of its own, and this process's handles know it."""
        port = ports.free_port()
        found = await tensors_replica(self.cluster, port, self.directory, **environ)
        Clients.use(Settings(static={name.upper(): (f"127.0.0.1:{port}",)}))
        return found

    async def stub(self, **options: Any) -> TensorsStub:
        """Of a handle whose link is open."""
        stub = handle(TensorsStub, "tensors", timeout_s=20, **options)
        before = len(self.memory.links)
        await stub.Keep(Tensor())
        await until(lambda: len(self.memory.links) > before, "a link")
        return stub

    def ways(self) -> dict[str, float]:
        """The tensors that this process has sent, by way."""
        return {way: count for (way,), count in self.metrics.shared_memory_tensors.values.items() if count}

    def out(self) -> int:
        """Regions with content."""
        gc.collect()
        return sum(bool(region.holds or region.out) for region in self.memory.pool)

    async def close(self) -> None:
        await close_handles()
        self.keeper.cancel()
        await asyncio.wait([self.keeper])
        if self.shared is not None:
            self.shared.close()
        gc.collect()
        assert held("self") == (0, 0), "descriptors and mappings of regions are left"


@contextmanager
def serving() -> Iterator[Scope]:
    """As if this process served a request."""
    scope = Scope()
    token = SCOPE.set(scope)
    try:
        yield scope
    finally:
        SCOPE.reset(token)
        memory = process.MEMORY
        assert memory is not None
        with memory.lock:
            scope.end()


@pytest.fixture
async def caller(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Caller]:
    made = Caller(cluster, tmp_path, LIMIT)
    yield made
    await made.close()


def large(number: float = 0) -> Any:
    return np.full(SIZE, number, np.float32)


@pytest.mark.parametrize(("transport", "in_thread"), [("lane", "false"), ("lane", "true"), ("grpc", "true")])
async def test_every_kind_of_call_shares_its_tensors_with_one_copy_each_way(
    caller: Caller, client: ClientSession, free_port: int, transport: str, in_thread: str
) -> None:
    await caller.replica(PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD=in_thread, PIERHEAD_ADMIN_PORT=str(free_port))
    stub = await caller.stub(transport=transport)
    with serving():
        for number in range(6):
            for method in (stub.One, stub.Batched):
                reply = await method(tensors.from_numpy(large(number)))
                assert reply.HasField("shared")
                found = tensors.to_numpy(reply)
                assert in_place(found)
                assert not found.flags.writeable
                assert (found == number + 1).all()

        async def requests() -> AsyncIterator[Tensor]:
            for number in range(20):
                yield tensors.from_numpy(large(number))

        assert (tensors.to_numpy(await stub.Join(requests())) == sum(range(20))).all()
        assert [tensors.to_numpy(item)[7] async for item in stub.Talk(requests())] == list(range(1, 21))
        assert [tensors.to_numpy(item)[9] async for item in stub.Split(tensors.from_numpy(large()))] == list(range(20))
    del reply, found
    assert caller.ways() == {"shared": 12 + 20 + 20 + 1}
    copied, sent = caller.metrics.shared_memory_copied.values[()], caller.metrics.shared_memory_sent.values[()]
    assert copied == sent == 53 * SIZE * 4
    async with client.get(f"http://127.0.0.1:{free_port}/metrics") as page:
        theirs = re.findall(r"^pierhead_shared_memory_(copied|sent)_bytes_total\S* (\S+)$", await page.text(), re.M)
    assert [(what, float(count)) for what, count in sorted(theirs)] == [("copied", sent), ("sent", sent)]
    await until(lambda: caller.out() == 0, "every region is free")
    await until(lambda: not caller.memory.received, "every reply is released")


@pytest.mark.parametrize("transport", ["lane", "grpc"])
async def test_a_method_of_a_class_shares_its_arrays_with_one_copy_each_way(caller: Caller, transport: str) -> None:
    await caller.replica(servicer="TensorsClass")
    service: Any = handle_on(TensorsClass, HandleChannel("tensors", timeout_s=20, transport=transport))
    with suppress(UserCodeError):
        await service.one(large())  # sent as bytes: there is no link yet
    await until(lambda: bool(caller.memory.links), "a link")
    with serving():
        for number in range(6):
            found = await service.one(large(number))
            assert in_place(found)
            assert (found == number + 1).all()
        assert [item[9] async for item in service.split(large())] == list(range(20))
        del found
    assert caller.ways() == {"shared": 7}
    copied, sent = caller.metrics.shared_memory_copied.values[()], caller.metrics.shared_memory_sent.values[()]
    assert copied == sent == 7 * SIZE * 4


async def test_an_array_outlives_its_call_at_either_end(caller: Caller) -> None:
    await caller.replica()
    stub = await caller.stub()
    with serving():
        await stub.Keep(tensors.from_numpy(large(5)))
        array = tensors.to_numpy(await stub.One(tensors.from_numpy(large(1))))
    for number in range(3):
        with serving():
            await stub.One(tensors.from_numpy(large(number)))
    assert (array == 2).all()
    await until(lambda: caller.out() == 1, "one region is kept by the replica")
    await stub.Keep(Tensor())
    await until(lambda: caller.out() == 0, "the replica has dropped its array")
    assert len(caller.memory.received) == 1
    del array
    await until(lambda: not caller.memory.received, "the reply's content is released")


async def test_what_cannot_be_shared_arrives_as_bytes(caller: Caller) -> None:
    outside = tensors.from_numpy(large(1))
    assert len(outside.data) == SIZE * 4  # no request is being served
    await caller.replica()
    stub = await caller.stub()
    assert not (await stub.One(outside)).HasField("shared")  # nothing says when this code has read the reply
    with serving():
        assert tensors.from_numpy(np.zeros(8)).data  # below the threshold
        huge = tensors.from_numpy(np.zeros(LIMIT + 1, np.uint8))
        assert len(huge.data) == LIMIT + 1
        assert caller.ways() == {"full": 1}
        # A tensor that was received is copied for its next destination.
        received = await stub.One(tensors.from_numpy(large(2)))
        again = await stub.Forward(received)
        assert (tensors.to_numpy(again) == 3).all()
        assert caller.ways() == {"full": 1, "shared": 1, "copied": 1}


async def test_without_the_directory_tensors_travel_as_bytes(caller: Caller, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="PIERHEAD_SHARED_MEMORY_DIR: expected a directory"):
        SharedMemory(Memory(LIMIT, 1, str(tmp_path / "none"), RuntimeMetrics()))
    await caller.replica()
    shutil.rmtree(tmp_path)
    stub = handle(TensorsStub, "tensors", timeout_s=20)
    with serving():
        reply = await stub.One(tensors.from_numpy(large(1)))
        assert not reply.HasField("shared")
        assert (tensors.to_numpy(reply) == 2).all()
    assert not caller.memory.links


async def test_content_that_is_gone_is_an_error_and_the_lane_lives_on(caller: Caller) -> None:
    await caller.replica()
    stub = await caller.stub()
    with serving():
        late = tensors.from_numpy(large(1))
        reply = await stub.One(late)
    with serving():
        with pytest.raises(ContentGone, match="belonged to a request"):
            await stub.One(late)
        with pytest.raises(ContentGone, match="belonged to a request"):
            tensors.to_numpy(reply)
        forged = Tensor(dtype=tensors.FLOAT32, shape=[SIZE])
        forged.shared.region, forged.shared.generation, forged.shared.length = bytes(16), 1, SIZE * 4
        with pytest.raises(ContentGone):
            await stub.One(forged)
        assert (tensors.to_numpy(await stub.One(tensors.from_numpy(large(1)))) == 2).all()


async def test_a_killed_receiver_leaves_nothing(caller: Caller) -> None:
    replica = await caller.replica()
    stub = await caller.stub()
    with serving():
        await stub.Keep(tensors.from_numpy(large(5)))
    assert caller.out() == 1
    replica.kill()
    await until(lambda: not caller.memory.links, "the link's end was seen")
    assert caller.out() == 0
    assert not [region for region in caller.memory.pool if region.spoiled]


async def test_a_receiver_that_never_lets_go_gets_bytes_once_the_memory_is_full(caller: Caller) -> None:
    await caller.replica()
    stub = await caller.stub()
    room = LIMIT // (SIZE * 4)
    with serving():
        for number in range(room + 3):
            await stub.Keep(tensors.from_numpy(large(number)))
    assert caller.ways() == {"shared": room, "full": 3}
    await until(lambda: caller.out() == room, "the replica keeps all of it")
    extremes = tensors.to_numpy(await stub.Keep(Tensor()))
    assert extremes.tolist() == [[number, number] for number in range(room + 3)], "each is what was sent"
    await until(lambda: caller.out() == 0, "the replica has let go")
    with serving():
        await stub.Keep(tensors.from_numpy(large()))
    assert caller.ways() == {"shared": room + 1, "full": 3}


@pytest.mark.parametrize("transport", ["lane", "grpc"])
async def test_content_of_messages_that_nobody_reads_is_asked_back(caller: Caller, transport: str) -> None:
    await caller.replica(PIERHEAD_SHARED_MEMORY_BYTES=str(4 * SIZE * 4))
    stub = await caller.stub(transport=transport)
    with serving():
        with pytest.raises(grpc.RpcError, match=r"Missing|not found"):
            await stub.Missing(tensors.from_numpy(large()))
        for _ in range(6):
            call = stub.Split(tensors.from_numpy(large()))
            await anext(aiter(call))
            await stub.Keep(Tensor())  # in that time the second reply arrives
            call.cancel()
    del call
    await until(lambda: caller.out() == 0, "the replica never saw the refused request, and says so")
    found: list[Tensor] = []  # the replica's four regions hold replies that nobody has read
    while len(found) < 4:
        with serving():
            found = [await stub.One(tensors.from_numpy(large())) for _ in range(4)]
            found = [reply for reply in found if reply.HasField("shared")]


async def test_a_sender_that_is_killed_while_it_writes_tears_nothing(caller: Caller) -> None:
    replica = await caller.replica()
    stub = await caller.stub()
    with serving():
        array = tensors.to_numpy(await stub.One(tensors.from_numpy(large(6))))
        await stub.One(tensors.from_numpy(large(7)))  # its region, which this process maps, is filled again
    with serving(), pytest.raises(ReplicaDied):
        await stub.Die(tensors.from_numpy(large(1)))
    await replica.wait()
    await until(lambda: not caller.memory.links, "the link's end was seen")
    assert (array == 7).all()
    assert caller.out() == 0
