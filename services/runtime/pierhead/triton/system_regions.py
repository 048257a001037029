"""Large tensors in system shared memory.

A region is made once and used by one call after another: a file in the directory that is the server's /dev/shm,
registered with the server, and removed at once, as both sides have mapped it. Regions belong to one connection.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from pierhead.triton.owner import Owner
from pierhead.triton.registrations import RPC_TIMEOUT_S, Registrations

logger = logging.getLogger("pierhead")

MAX_REGIONS = 64
"""Most regions of one connection. The size of the directory's file system bounds their bytes."""

IDLE_S = 10.0
"""How long a region without a call stays."""

PAUSE_S = 10.0
"""After a region could not be made, for how long none is tried."""


class SystemRegion:
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


class SystemRegions:
    """The regions of one connection: free ones, those that calls have, and how they are made."""

    def __init__(self, stub: Any, owner: Owner, registrations: Registrations) -> None:
        self._stub = stub
        self._owner = owner
        self._registrations = registrations
        self._loop = asyncio.get_running_loop()
        self._all: dict[str, SystemRegion] = {}
        self._free: dict[SystemRegion, float] = {}
        """With the time since when."""
        self._making = False
        self._not_before = 0.0
        self._failure = ""
        """Why a region could not be made."""
        self._epoch = 0
        """Grows when the connection is lost."""
        self._unclean = True
        """Whether the server may have regions of killed processes."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self, size: int) -> SystemRegion | None:
        """A region of at least `size` bytes; None = there is none yet."""
        most = max(2 * size, mmap.PAGESIZE)
        fits = [region for region in self._free if size <= region.size <= most]
        if fits:
            region = min(fits, key=lambda each: each.size)
            del self._free[region]
            return region
        full = len(self._all) >= MAX_REGIONS or self._loop.time() < self._not_before
        if not (self._making or full or self._registrations.closed):
            self._making = True
            self._registrations.run(self._make(-size // mmap.PAGESIZE * -mmap.PAGESIZE))
        return None

    def why_none(self) -> str:
        """Why there was none, as the metrics say it."""
        if self._loop.time() < self._not_before:
            return self._failure
        return "full" if len(self._all) >= MAX_REGIONS else "new"

    def give_back(self, region: SystemRegion) -> None:
        """Its call has succeeded, and nothing reads the memory any more."""
        if region.name in self._all:
            self._free[region] = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(IDLE_S, self._expire)

    def remove(self, region: SystemRegion) -> None:
        """Its call failed, or was cancelled: the server may read it still."""
        if self._all.pop(region.name, None) is not None:
            self._registrations.remove(region.name)

    def lost(self) -> None:
        """The connection is gone. Where the server is not, it is asked to let go once there is a connection again."""
        self._epoch += 1
        self._not_before = 0.0
        self._free.clear()
        while self._all:
            self.remove(next(iter(self._all.values())))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- inside

    async def _make(self, size: int) -> None:
        epoch = self._epoch
        try:
            region = await self._registered(size)
        except (OSError, grpc.aio.AioRpcError) as error:
            words = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            logger.warning("no shared memory of %d bytes with Triton: %s; messages carry the bytes", size, words)
            self._not_before = self._loop.time() + PAUSE_S
            self._failure = "full" if isinstance(error, OSError) else "elsewhere"
            return
        finally:
            self._making = False
        if epoch != self._epoch:
            self._registrations.remove(region.name)
            return
        self._all[region.name] = region
        self.give_back(region)
        if self._unclean:
            self._unclean = False
            await self._clean_up()

    async def _registered(self, size: int) -> SystemRegion:
        """A new region. Raises OSError, AioRpcError."""
        self._owner.hold()
        name = self._owner.new_name()
        path = self._owner.directory / name
        region = SystemRegion(path, size)
        self._registrations.add(name, partial(self._unregister, name))
        try:
            request = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=size)
            await self._stub.SystemSharedMemoryRegister(request, timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            self._registrations.discard(name)
            raise
        finally:
            path.unlink()
        return region

    async def _unregister(self, name: str) -> bool:
        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        await self._stub.SystemSharedMemoryUnregister(request, timeout=RPC_TIMEOUT_S)
        return True

    async def _clean_up(self) -> None:
        """Remove what killed processes left: files, and what is registered for them. Only where the directory surely is
        the server's: a process of another machine has its file elsewhere.
        """
        self._owner.remove_files_of_killed_processes()
        with suppress(grpc.aio.AioRpcError):
            request = service_pb2.SystemSharedMemoryStatusRequest()
            for name in (await self._stub.SystemSharedMemoryStatus(request, timeout=RPC_TIMEOUT_S)).regions:
                if self._owner.left_over(name):
                    self._registrations.add(name, partial(self._unregister, name))
                    self._registrations.remove(name)

    def _expire(self) -> None:
        self._timer = None
        old = self._loop.time() - IDLE_S
        for region, since in list(self._free.items()):
            if since <= old:
                del self._free[region]
                self.remove(region)
        if self._free:
            self._timer = self._loop.call_later(min(self._free.values()) - old, self._expire)
