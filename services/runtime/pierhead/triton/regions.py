"""The memory that one server has mapped for one connection: docs/decisions/memory.md.

System memory: a region of `pierhead.memory`'s pool, which one call after another fills. It is a file in the directory
that is the server's /dev/shm, registered with the server, and removed at once, as both sides have mapped it.
GPU memory: the caller's own, registered for one call.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import sys
from collections.abc import Collection, Coroutine
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from tritonclient.grpc import service_pb2

from pierhead.memory.pool import Region, RegionPool
from pierhead.memory.regions import Mapping
from pierhead.metrics import PROCESS
from pierhead.tasks import end_tasks
from pierhead.triton.cuda import DeviceArray

logger = logging.getLogger("pierhead")

RPC_TIMEOUT_S = 5.0
"""For the calls that register memory, and have the server let go of it."""

CLOSE_TIMEOUT_S = 5.0
"""How long a connection that closes asks the server to let go of its regions."""

RETRY_S = (0.05, 1.0)
"""Shortest and longest pause before the server is asked again to let go of a region that it still reads."""

IDLE_S, TURN_S = 10.0, 1.0
"""How long a region without a call stays, and how often such ones are looked for."""

PAUSE_S = 10.0
"""After a region could not be made, for how long none is tried."""

PREFIX = "pierhead-"
"""An owner's file is `pierhead-<16 hex digits>`; its regions have `-<number>` behind that."""

NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class CudaRegion(NamedTuple):
    """An input in GPU memory, which is kept until the server has let go of it."""

    name: str
    array: DeviceArray
    registering: asyncio.Future[Any]


class TritonRegions:
    """Belongs to the connection's event loop, and owns the tasks that register and unregister.

    Whose a region is says a file that the connection holds locked: the kernel ends the lock with the process, however
    that ends. What an owner without a lock had is left over.
    """

    def __init__(self, stub: Any, directory: str) -> None:
        """`directory`: "" = there is none, and nothing may be taken."""
        self._stub = stub
        self._owner = Path(directory) / f"{PREFIX}{os.urandom(8).hex()}"
        self._names = (f"{self._owner.name}-{number}" for number in count())
        self._lock: int | None = None
        """Of the owner's file, since the first region."""
        self._loop = asyncio.get_running_loop()
        self._pool = RegionPool(sys.maxsize, lambda: next(self._names).encode())  # the file system is the limit
        self._known: dict[str, CudaRegion | None] = {}
        """What the server has mapped, or is about to; None = system memory."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = self._making = False
        self._not_before, self._failure = 0.0, ""
        """Until when no region is made, and why."""
        self._unclean = True
        """Whether the server may have regions of killed processes."""

    # ---- system memory

    def take(self, sizes: Collection[int]) -> Region | None:
        """A region for tensors of these bytes; None = there are none, or no region yet. Counts the tensors."""
        if not sizes:
            return None
        region, way, paused = self._pool.take(sum(sizes), None), "shared", self._loop.time() < self._not_before
        if region is None:
            way = "full"
        elif region.memory is None:
            way = self._failure if paused else "new"
            if paused or self._making or self._closed:
                self._pool.remove(region)
            else:
                self._making = True
                self._run(self._make(region))
            region = None
        self._unregister_removed()
        PROCESS.shared_memory_tensors.inc((way,), len(sizes))
        return region

    def end(self, region: Region, *, failed: bool) -> None:
        """The region's call is over; `failed`, or cancelled: the server may read the memory still."""
        if failed:
            self._pool.remove(region)
            self._unregister_removed()
        else:
            self._pool.let_go(region.name, region.generation, self._loop.time())

    def end_soon(self, region: Region) -> None:
        """The array of it died: in any thread, also after the loop was closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(partial(self.end, region, failed=False))

    def lost(self) -> None:
        """The connection is gone. Where the server is not, it is asked to let go once there is a connection again."""
        self._not_before = 0.0
        for region in list(self._pool):
            self.end(region, failed=True)

    # ---- GPU memory

    def register(self, array: DeviceArray) -> CudaRegion:
        """Begin to register the allocation of an array, for one call."""
        found, name = array.allocation, next(self._names)
        request = service_pb2.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=found.handle, device_id=found.device, byte_size=found.size
        )
        registering = asyncio.ensure_future(self._stub.CudaSharedMemoryRegister(request, timeout=RPC_TIMEOUT_S))
        region = self._known[name] = CudaRegion(name, array, registering)
        return region

    def unregister(self, name: str) -> None:
        """Make the server release a region, as soon as it no longer reads it."""
        if not self._closed:
            self._run(self._unregister(name))

    async def close(self) -> None:
        """Make the server release everything, within CLOSE_TIMEOUT_S; what it reads for longer stays."""
        self.lost()
        self._closed = True
        await end_tasks(*self._tasks)  # it is asked again for all, also those that were about to be registered
        for name in self._known:
            self._run(self._unregister(name))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        await end_tasks(*self._tasks)
        if self._lock is not None:
            with suppress(OSError):
                self._owner.unlink()
            os.close(self._lock)
            self._lock = None

    # ---- inside

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task, which ends with the connection."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make(self, region: Region) -> None:
        name = region.name.decode()
        try:
            region.memory = await self._registered(name, region.size)
        except (OSError, grpc.aio.AioRpcError) as error:
            words = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            logger.warning("no shared memory of %d bytes with Triton: %s; messages carry the bytes", region.size, words)
            self._not_before = self._loop.time() + PAUSE_S
            self._failure = "full" if isinstance(error, OSError) else "elsewhere"
            self.end(region, failed=True)
            return
        finally:
            self._making = False
        if self._pool.get(region.name) is None:  # the connection was lost
            self.unregister(name)
            return
        self.end(region, failed=False)
        if len(self._pool) == 1:
            self._run(self._expire())
        if self._unclean:
            self._unclean = False
            await self._clean_up()

    async def _registered(self, name: str, size: int) -> Mapping:
        if self._lock is None:
            hidden = self._owner.with_name(f".{self._owner.name}")  # so that no process finds it before it is locked
            self._lock = os.open(hidden, NEW_FILE, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            hidden.rename(self._owner)
        path = self._owner.with_name(name)
        fd = os.open(path, NEW_FILE)
        try:
            os.fchmod(fd, 0o666)  # the server may run as another user
            os.posix_fallocate(fd, 0, size)  # else a full file system is SIGBUS where the memory is written
            mapping = Mapping(mmap.mmap(fd, size))
            self._known[name] = None
            request = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=size)
            await self._stub.SystemSharedMemoryRegister(request, timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            del self._known[name]
            raise
        finally:
            path.unlink()
            os.close(fd)
        return mapping

    async def _expire(self) -> None:
        """Give back regions without a call, while there are regions."""
        while len(self._pool):
            await asyncio.sleep(TURN_S)
            self._pool.expire(self._loop.time() - IDLE_S)
            self._unregister_removed()

    def _unregister_removed(self) -> None:
        for region in self._pool.removed:
            if region.memory is not None:
                self.unregister(region.name.decode())
        self._pool.removed.clear()

    async def _unregister(self, name: str) -> None:
        pause, longest = RETRY_S
        while not await self._gone(name):
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _gone(self, name: str) -> bool:
        """Whether there is nothing more to ask for. A server refuses to let go of system memory while a request of its
        own reads it; of GPU memory later ones agree at once, and list it for as long as they read it.
        """
        region = self._known[name]
        if region is not None:
            await asyncio.wait([region.registering])
            region.registering.exception()  # marks it as read
        kind = "System" if region is None else "Cuda"
        request = getattr(service_pb2, f"{kind}SharedMemoryUnregisterRequest")(name=name)
        try:
            await getattr(self._stub, f"{kind}SharedMemoryUnregister")(request, timeout=RPC_TIMEOUT_S)
            if name in await self._listed(kind):
                return False
        except grpc.aio.AioRpcError as error:
            return self._closed and error.code() is grpc.StatusCode.UNAVAILABLE
        self._known.pop(name, None)
        return True

    async def _listed(self, kind: str) -> Collection[str]:
        every = getattr(service_pb2, f"{kind}SharedMemoryStatusRequest")()
        reply = await getattr(self._stub, f"{kind}SharedMemoryStatus")(every, timeout=RPC_TIMEOUT_S)
        return list(reply.regions)

    async def _clean_up(self) -> None:
        """Remove what killed processes left: files, and what is registered for them. Only where the directory surely is
        the server's: a process of another machine has its file elsewhere.
        """
        for owner in self._owner.parent.glob(PREFIX + "[0-9a-f]" * 16):
            if not _lives(owner):
                for each in (*owner.parent.glob(f"{owner.name}-*"), owner):
                    with suppress(OSError):  # another user's
                        each.unlink()
        with suppress(grpc.aio.AioRpcError):
            for name in await self._listed("System"):
                owner = self._owner.parent / name.rpartition("-")[0]
                if owner.name.startswith(PREFIX) and not _lives(owner):
                    self._known[name] = None
                    self.unregister(name)


def _lives(owner: Path) -> bool:
    """Whether a process holds the file's lock."""
    try:
        with owner.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False
