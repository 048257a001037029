"""Large tensors of `pierhead.triton` in system shared memory: docs/decisions/triton-shared-memory.md.

A region is made once and used by one call after another: a file in the directory that is the server's /dev/shm,
registered with the server, and removed at once, as both sides have mapped it. Regions belong to one connection.

An input in GPU memory is a region of its own, for one call.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pierhead.tasks import end_tasks
from pierhead.triton_cuda import DeviceArray

logger = logging.getLogger("pierhead")

MAX_REGIONS = 64
"""Most regions of one connection. The size of the directory's file system bounds their bytes."""

IDLE_S = 10.0
"""How long a region without a call stays."""

PAUSE_S = 10.0
"""After a region could not be made, for how long none is tried."""

RPC_TIMEOUT_S = 5.0

RETRY_S = (0.05, 1.0)
"""Shortest and longest pause before the server is asked again to let go of a region that it still reads."""

OWNER, PART = "pierhead-{}", "pierhead-{}-{}"
"""Names: of the file that a connection holds locked while its process lives, and of its regions."""


class TritonRegion:
    """Memory that this process and the server have mapped."""

    __slots__ = ("mapped", "name", "size")

    def __init__(self, path: Path, size: int) -> None:
        """Make the file, with all its pages. Raises OSError."""
        self.name, self.size = path.name, size
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            os.fchmod(fd, 0o666)  # the server may run as another user
            os.posix_fallocate(fd, 0, size)  # else a full file system is SIGBUS where the memory is written
            self.mapped = mmap.mmap(fd, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)


class CudaRegion(NamedTuple):
    """An input in GPU memory, which is kept until the server has let go of it."""

    name: str
    array: DeviceArray
    registering: asyncio.Future[Any]


class TritonRegions:
    """The regions registered over one connection. Belongs to the connection's event loop."""

    def __init__(self, channel: grpc.aio.Channel, directory: str) -> None:
        """`directory`: "" = there is none, and nothing may be taken."""
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._loop = asyncio.get_running_loop()
        self._directory = Path(directory)
        self._token = os.urandom(8).hex()
        self._owner: int | None = None
        self._numbers = count()
        self._all: dict[str, TritonRegion] = {}
        self._free: dict[TritonRegion, float] = {}
        """With the time since when."""
        self._cuda: dict[str, CudaRegion] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._making = False
        self._not_before = 0.0
        self._failure = ""
        """Why a region could not be made."""
        self._closed = False
        self._epoch = 0
        """Grows when the connection is lost."""
        self._unclean = True
        """Whether the server may have regions of killed processes."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self, size: int) -> TritonRegion | None:
        """A region of at least `size` bytes; None = there is none yet."""
        if self._closed:
            return None
        most = max(2 * size, mmap.PAGESIZE)
        fits = [region for region in self._free if size <= region.size <= most]
        if fits:
            region = min(fits, key=lambda each: each.size)
            del self._free[region]
            return region
        if not self._making and len(self._all) < MAX_REGIONS and self._loop.time() >= self._not_before:
            self._making = True
            self._run(self._make(-size // mmap.PAGESIZE * -mmap.PAGESIZE))
        return None

    def why_none(self) -> str:
        """Why there was none, as the metrics say it."""
        if self._loop.time() < self._not_before:
            return self._failure
        return "full" if len(self._all) >= MAX_REGIONS else "new"

    def give_back(self, region: TritonRegion) -> None:
        """Its call has succeeded, and nothing reads the memory any more."""
        if region.name in self._all:
            self._free[region] = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(IDLE_S, self._expire)

    def remove(self, region: TritonRegion) -> None:
        """Its call failed, or was cancelled: the server may read it still."""
        if self._all.pop(region.name, None) is not None:
            self._run(self._unregister(region.name))

    def register(self, array: DeviceArray) -> CudaRegion:
        """Begin to register the allocation of an array, for one call."""
        name, found = PART.format(self._token, next(self._numbers)), array.allocation
        request = service_pb2.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=found.handle, device_id=found.device, byte_size=found.size
        )
        registering = asyncio.ensure_future(self._stub.CudaSharedMemoryRegister(request, timeout=RPC_TIMEOUT_S))
        region = self._cuda[name] = CudaRegion(name, array, registering)
        return region

    def release(self, region: CudaRegion) -> None:
        """The call has ended, in whatever way."""
        self._run(self._unregister(region.name))

    def lost(self) -> None:
        """The connection is gone. Where the server is not, it is asked to let go once there is a connection again."""
        self._epoch += 1
        self._not_before = 0.0
        self._free.clear()
        while self._all:
            self.remove(next(iter(self._all.values())))

    async def close(self) -> None:
        """Unregister everything that the server does not read."""
        if self._timer is not None:
            self._timer.cancel()
        self._epoch += 1
        self._closed = True
        names = [*self._all, *self._cuda]
        self._all.clear()
        await end_tasks(*self._tasks)
        await asyncio.gather(*(self._unregistered(name) for name in names), return_exceptions=True)
        if self._owner is not None:
            with suppress(OSError):
                (self._directory / OWNER.format(self._token)).unlink()
            os.close(self._owner)
            self._owner = None

    # ---- inside

    async def _make(self, size: int) -> None:
        epoch, path = self._epoch, self._directory / PART.format(self._token, next(self._numbers))
        try:
            self._own()
            region = TritonRegion(path, size)
            try:
                request = service_pb2.SystemSharedMemoryRegisterRequest(
                    name=path.name, key=f"/{path.name}", byte_size=size
                )
                await self._stub.SystemSharedMemoryRegister(request, timeout=RPC_TIMEOUT_S)
            finally:
                path.unlink()
        except (OSError, grpc.aio.AioRpcError) as error:
            words = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            logger.warning("no shared memory of %d bytes with Triton: %s; messages carry the bytes", size, words)
            self._not_before = self._loop.time() + PAUSE_S
            self._failure = "full" if isinstance(error, OSError) else "elsewhere"
        else:
            self._all[path.name] = region
            if epoch != self._epoch:
                self.remove(region)
            self.give_back(region)
            if self._unclean:
                self._unclean = False
                await self._clean_up()
        finally:
            self._making = False

    async def _unregister(self, name: str) -> None:
        pause, longest = RETRY_S
        while not await self._unregistered(name):
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _unregistered(self, name: str) -> bool:
        """Whether the server let go of it: it refuses while a request of its own reads it."""
        try:
            if name in self._cuda:
                return await self._let_go_of(self._cuda[name])
            request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
            await self._stub.SystemSharedMemoryUnregister(request, timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def _let_go_of(self, region: CudaRegion) -> bool:
        """Later servers agree to unregister a region at once, and list it for as long as they read it."""
        await asyncio.wait([region.registering])
        region.registering.exception()  # marks it as read
        request = service_pb2.CudaSharedMemoryUnregisterRequest(name=region.name)
        await self._stub.CudaSharedMemoryUnregister(request, timeout=RPC_TIMEOUT_S)
        every = service_pb2.CudaSharedMemoryStatusRequest()
        if region.name in (await self._stub.CudaSharedMemoryStatus(every, timeout=RPC_TIMEOUT_S)).regions:
            return False
        self._cuda.pop(region.name, None)
        return True

    def _expire(self) -> None:
        self._timer = None
        old = self._loop.time() - IDLE_S
        for region, since in list(self._free.items()):
            if since <= old:
                del self._free[region]
                self.remove(region)
        if self._free:
            self._timer = self._loop.call_later(min(self._free.values()) - old, self._expire)

    def _own(self) -> None:
        """Hold this connection's file locked: the kernel ends the lock with the process, however that ends."""
        if self._owner is None:
            path = self._directory / OWNER.format(self._token)
            hidden = path.with_name(f".{path.name}")  # so that no other process finds it before it is locked
            self._owner = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._owner, fcntl.LOCK_EX)
            hidden.rename(path)

    async def _clean_up(self) -> None:
        """Remove what killed processes left: files, and what is registered for them. Only where the directory surely is
        the server's: a process of another machine has its file elsewhere.
        """
        for path in self._directory.glob(OWNER.format("[0-9a-f]" * 16)):
            if _dead(path):
                for each in (*self._directory.glob(f"{path.name}-*"), path):
                    with suppress(OSError):  # another user's
                        each.unlink()
        with suppress(grpc.aio.AioRpcError):
            request = service_pb2.SystemSharedMemoryStatusRequest()
            for name in (await self._stub.SystemSharedMemoryStatus(request, timeout=RPC_TIMEOUT_S)).regions:
                owner = name.rpartition("-")[0]
                if owner.startswith(OWNER.format("")) and _dead(self._directory / owner):
                    self._run(self._unregister(name))

    def _run(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _dead(path: Path) -> bool:
    """Whether nothing holds the file's lock, or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
