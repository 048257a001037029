"""What the handles of one event loop share: one directory, one pool per service."""

from __future__ import annotations

import asyncio
import weakref
from typing import ClassVar

from pierhead.directory import Directory
from pierhead.pool import Pool
from pierhead.settings import Settings
from pierhead.transports import TRANSPORTS


class Clients:
    """Pools and directory of one event loop. Made at the first call within that loop."""

    _of_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Clients]] = weakref.WeakKeyDictionary()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._directory = Directory(settings)
        self._pools: dict[tuple[str, str], Pool] = {}

    @classmethod
    def current(cls) -> Clients:
        """The running loop's. Reads the environment the first time: raises SettingsError."""
        loop = asyncio.get_running_loop()
        found = cls._of_loop.get(loop)
        if found is None:
            found = cls._of_loop[loop] = cls(Settings.from_env())
        return found

    @classmethod
    def use(cls, settings: Settings) -> Clients:
        """Give the running loop's handles these settings instead of the environment's, unless one was used already."""
        return cls._of_loop.setdefault(asyncio.get_running_loop(), cls(settings))

    def pool(self, service: str, transport: str) -> Pool:
        """The pool of a service; watching begins when it is first asked for."""
        key = (service, transport)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(service, TRANSPORTS[transport])
            self._directory.add(service, pool.set_endpoints)
        return pool

    async def close(self) -> None:
        """Close every connection and watcher; calls in flight fail. The next call starts afresh."""
        self._of_loop.pop(asyncio.get_running_loop(), None)
        await self._directory.close()
        for pool in self._pools.values():
            await pool.close()


async def close_handles() -> None:
    """Close what the handles of the running loop hold. `serve` does it; scripts and tests may."""
    found = Clients._of_loop.get(asyncio.get_running_loop())
    if found is not None:
        await found.close()
