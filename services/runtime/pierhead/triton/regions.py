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
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from pierhead.memory.pool import MAX_REGIONS, Region, RegionPool
from pierhead.memory.regions import Mapping
from pierhead.tasks import end_tasks
from pierhead.triton.cuda import RPC_TIMEOUT_S, CudaRegion, DeviceArray

logger = logging.getLogger("pierhead")

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


class Owner:
    """Whose a region is: a connection's, which holds a file locked while its process lives. The kernel ends the lock
    with the process, however that ends. What an owner without a lock had is left over.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self._path = self.directory / f"{PREFIX}{os.urandom(8).hex()}"
        self._numbers = count()
        self._fd: int | None = None

    def new_name(self) -> str:
        """A name for a region."""
        return f"{self._path.name}-{next(self._numbers)}"

    def hold(self) -> None:
        """Make the file, and hold it locked. Raises OSError."""
        if self._fd is None:
            hidden = self._path.with_name(f".{self._path.name}")  # so that no process finds it before it is locked
            self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            hidden.rename(self._path)

    def release(self) -> None:
        """Remove the file."""
        if self._fd is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = None

    def remove_files_of_killed_processes(self) -> None:
        """Their own, and those of their regions."""
        for path in self.directory.glob(PREFIX + "[0-9a-f]" * 16):
            if _dead(path):
                for each in (*self.directory.glob(f"{path.name}-*"), path):
                    with suppress(OSError):  # another user's
                        each.unlink()

    def left_over(self, region: str) -> bool:
        """Whether a region is one of ours whose process was killed."""
        owner = region.rpartition("-")[0]
        return owner.startswith(PREFIX) and _dead(self.directory / owner)


def _dead(path: Path) -> bool:
    """Whether nothing holds the file's lock, or it is gone."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True


class TritonRegions:
    """Belongs to the connection's event loop, and owns the tasks that register and unregister."""

    def __init__(self, stub: Any, directory: str) -> None:
        """`directory`: "" = there is none, and nothing may be taken."""
        self._stub = stub
        self._owner = Owner(directory)
        self._loop = asyncio.get_running_loop()
        self._pool = RegionPool(sys.maxsize, lambda: self._owner.new_name().encode())  # the file system is the limit
        self._known: dict[str, CudaRegion | None] = {}
        """What the server has mapped, or is about to; None = system memory."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = self._making = False
        self._not_before, self._failure = 0.0, ""
        """Until when no region is made, and why."""
        self._unclean = True
        """Whether the server may have regions of killed processes."""

    # ---- system memory

    def take(self, size: int) -> Region | None:
        """A region of at least `size` bytes; None = there is none yet."""
        region = self._pool.take(size, None)
        if region is not None and region.memory is None:
            if self._making or self._closed or self._loop.time() < self._not_before:
                self._pool.remove(region)
            else:
                self._making = True
                self._run(self._make(region))
            region = None
        self._unregister_removed()
        return region

    def why_none(self) -> str:
        """Why there was none, as the metrics say it."""
        if self._loop.time() < self._not_before:
            return self._failure
        return "full" if len(self._pool) >= MAX_REGIONS else "new"

    def end(self, region: Region, *, failed: bool) -> None:
        """The region's call is over, and nothing reads the memory any more; or it failed, or was cancelled: the server
        may read it still.
        """
        if failed:
            self._pool.remove(region)
            self._unregister_removed()
        else:
            self._pool.let_go(region.name, region.generation, self._loop.time())

    def end_soon(self, region: Region) -> None:
        """Its call is over, and an array of it died: in any thread, also after the loop was closed."""
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
        region = CudaRegion(self._stub, self._owner.new_name(), array)
        self._known[region.name] = region
        return region

    def unregister(self, name: str) -> None:
        """Have the server let go of a region, as soon as it reads it no more."""
        if not self._closed:
            self._run(self._unregister(name))

    async def close(self) -> None:
        """Have the server let go of everything, within CLOSE_TIMEOUT_S; what it reads for longer stays."""
        self.lost()
        self._closed = True
        await end_tasks(*self._tasks)  # it is asked again for all, also those that were about to be registered
        for name in self._known:
            self._run(self._unregister(name))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        await end_tasks(*self._tasks)
        self._owner.release()

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
        self._owner.hold()
        path = self._owner.directory / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
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
        self._owner.remove_files_of_killed_processes()
        with suppress(grpc.aio.AioRpcError):
            for name in await self._listed("System"):
                if self._owner.left_over(name):
                    self._known[name] = None
                    self.unregister(name)
