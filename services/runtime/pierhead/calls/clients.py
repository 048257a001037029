"""What the handles of one event loop share: one directory, one pool per service, the way to the shared store."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final, NamedTuple, Protocol

from pierhead.calls.directory import Directory
from pierhead.calls.pool import Pool
from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.lanes.client import TRANSPORTS
from pierhead.lanes.connection import Connection
from pierhead.metrics import PROCESS
from pierhead.settings import Settings
from pierhead.store.memory import OWN_STORE, Store
from pierhead.store.remote import RemoteStore

_HERE: Final = ReplicaListing([Endpoint(name="local", address="local")])


class InProcess(Protocol):
    """A replica in this process, see `pierhead.lanes.in_memory`; or several, each of another address."""

    def connect(self, address: str, changed: Callable[[], None]) -> Connection:
        """As a transport does."""
        ...


class Placed(NamedTuple):
    """A service in this process, as one event loop calls it."""

    replica: InProcess
    listing: ReplicaListing


class Clients:
    """Pools and directory of one event loop. Created at the first call within that loop."""

    _of_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Clients]] = weakref.WeakKeyDictionary()
    _overrides: ClassVar[weakref.WeakValueDictionary[str, InProcess]] = weakref.WeakValueDictionary()

    def __init__(self, settings: Settings) -> None:
        self._remote_store = RemoteStore(settings.discovery) if settings.discovery else None
        self.settings = settings
        self._directory = Directory(settings)
        self._pools: dict[tuple[str, str | InProcess], Pool] = {}
        self._placed: dict[str, Placed] = {}

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
        """Use these settings in the running loop instead of the environment's, unless a handle was used already."""
        return cls._of_loop.setdefault(asyncio.get_running_loop(), cls(settings))

    @classmethod
    def override(cls, service: str, replica: InProcess | None) -> InProcess | None:
        """Send every loop's calls for `service` to `replica`, in this process, for as long as it is referenced.
        None restores the service's own replicas. Returns the replica that was in force.
        """
        before = cls._overrides.pop(service, None)
        if replica is not None:
            cls._overrides[service] = replica
        for clients in cls._of_loop.values():
            clients._forget(service)
        return before

    @classmethod
    def unreached(cls) -> dict[str, dict[str, str]]:
        """By service, the listed replicas to which no call of this process goes, and why. For any thread."""
        pools = [pool for clients in list(cls._of_loop.values()) for pool in list(clients._pools.values())]
        found: dict[str, dict[str, str]] = {}
        for pool in pools:
            if not pool.closed and (unreached := pool.unreached()):
                found.setdefault(pool.service, {}).update(unreached)
        return found

    def place(self, service: str, placed: Placed) -> None:
        """Send this loop's calls for `service` to replicas in this process: these, or these from now on."""
        known = self._placed.get(service)
        self._placed[service] = placed
        if known is not None and known.replica is placed.replica:
            if (pool := self._pools.get((service, placed.replica))) is not None:
                pool.update(placed.listing)
            return
        self._directory.names = frozenset(self._placed)
        self._forget(service)

    async def drained(self, service: str) -> None:
        """Return once no call is at those replicas of `place` that are not listed any more, where none is."""
        placed = self._placed.get(service)
        pool = None if placed is None else self._pools.get((service, placed.replica))
        if pool is not None:
            await pool.drained()

    async def displace(self, service: str) -> None:
        """Undo `place`, if it was called: close the replica's connections and keep no reference to it."""
        placed = self._placed.pop(service, None)
        if placed is None:
            return
        self._directory.names = frozenset(self._placed)
        for key in [key for key in self._pools if key == (service, placed.replica)]:
            await self._pools.pop(key).close()

    def _forget(self, service: str) -> None:
        """Make handles look up the service's pool again."""
        for (name, _), pool in self._pools.items():
            if name == service:
                pool.closed = True

    def pool(self, service: str, transport: str) -> Pool:
        """The pool of a service; the first use begins to watch the service."""
        replica, listing = self._overrides.get(service), _HERE
        if replica is None and service in self._placed:
            replica, listing = self._placed[service]
        key = (service, transport if replica is None else replica)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(
                service,
                partial(TRANSPORTS[transport], service=service) if replica is None else replica.connect,
                ejected=lambda: PROCESS.handle_ejections.inc((service,)),
            )
            if replica is None:
                self._directory.add(service, pool.update)
            else:
                pool.update(listing)
        pool.closed = False
        return pool

    @property
    def store(self) -> Store:
        """The shared store: the controller's, else this process's own."""
        return OWN_STORE if self._remote_store is None else self._remote_store

    async def close(self) -> None:
        """Close every connection and watcher; calls in flight fail. The next call starts afresh."""
        self._of_loop.pop(asyncio.get_running_loop(), None)
        await self._directory.close()
        if self._remote_store is not None:
            await self._remote_store.close()
        for pool in self._pools.values():
            await pool.close()


async def close_handles() -> None:
    """Close the connections and watchers of the running loop's handles. `serve` does it; scripts and tests may."""
    found = Clients._of_loop.get(asyncio.get_running_loop())
    if found is not None:
        await found.close()
