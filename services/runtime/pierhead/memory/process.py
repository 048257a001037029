"""The shared memory of this process: its regions, its links, and what it has received.

User code of several threads and loops uses it; everything runs under one lock, but for the copying of content. What
dies in the garbage collector, in any thread, goes into a queue, which the owner's event loop empties.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Final

from pierhead.errors import ContentGone
from pierhead.memory.link import Link
from pierhead.memory.pool import Region, RegionPool
from pierhead.memory.regions import Content, ContentReference, OwnMemory
from pierhead.memory.scope import SCOPE, AnyScope
from pierhead.metrics import RuntimeMetrics
from pierhead.tensor.v1.tensor_pb2 import SharedContent

logger = logging.getLogger("pierhead")

IDLE_S = 10.0
"""How long a region stays without content before it is given back."""

TURN_S = 0.25
"""How often idle and overdue regions are looked for."""

MAX_SITES = 4096
"""Places in the code whose tensors' destinations are remembered."""

REPLY: Final = object()
"""The destination of a place in the code whose tensors go into replies."""


class Memory:
    """See the module. `threshold`: bytes from which content goes into shared memory."""

    def __init__(self, limit: int, threshold: int, directory: str, metrics: RuntimeMetrics) -> None:
        self.lock = threading.RLock()
        self.threshold = threshold
        self.directory = directory
        self.pool = RegionPool(limit, lambda: os.urandom(16))
        self.received: dict[tuple[bytes, int], ContentReference] = {}
        """Content of other processes, by region and generation."""
        self._own: dict[int, ContentReference] = {}
        """Content of this process that it reads itself, by id: a weak reference whose object is dead has no hash."""
        self.links: dict[bytes, Link] = {}
        self.metrics = metrics
        self._services: Counter[str] = Counter()
        """Open links by the service that they lead to."""
        self._sites: dict[Hashable, object] = {}
        """Where the tensors of a place in the code went last: a service, or REPLY."""
        self._made_at: dict[bytes, Hashable] = {}
        """By region: the place in the code that filled it last."""
        self._dead: deque[ContentReference | tuple[Region, int]] = deque()
        """Content that nothing reads any more, and (region, generation) of calls that have ended."""
        self.invite: Callable[[], str] | None = None
        """Makes a socket for a caller and returns its name; None = this process has no callers."""
        self._woken = False
        self._loop = asyncio.get_running_loop()
        metrics.shared_memory_limit.read = lambda: limit
        metrics.shared_memory_bytes.read = self._kernel_bytes
        metrics.shared_memory_regions.read = lambda: len(self.pool)
        metrics.shared_memory_peers.read = lambda: len(self.links)
        for way in ("shared", "copied", "full", "elsewhere"):
            metrics.shared_memory_tensors.inc((way,), 0)

    async def keep(self) -> None:
        """Give back idle regions and ask for overdue ones, until cancelled."""
        while True:
            await asyncio.sleep(TURN_S)
            self._look_after(time.monotonic())  # a function of its own: its variables keep regions mapped

    def close(self) -> None:
        """Give everything back."""
        with self.lock:
            for link in list(self.links.values()):
                self.lost(link)
            for region in list(self.pool):
                self.pool.remove(region)
            self._free()

    # ---- links

    def opened(self, link: Link) -> bool:
        """A link is open; False if another one has its token."""
        with self.lock:
            if link.token in self.links:
                return False
            self.links[link.token] = link
            self._services[link.service] += 1
            return True

    def readable(self, link: Link) -> None:
        """There is something to read from a link."""
        with self.lock:
            link.drain()
            link.flush()
            self._free()

    def lost(self, link: Link) -> None:
        """A link has ended. Regions that its other side may still read are not used again."""
        with self.lock:
            if self.links.get(link.token) is link:
                del self.links[link.token]
                self._services[link.service] -= 1
                self.pool.lost(link, None if link.service else link.token, time.monotonic())
            link.close()
            self._wake()

    def released(self, link: Link, name: bytes, generation: int, count: int) -> None:
        """A receiver has released messages."""
        self.pool.released(name, generation, link, count, time.monotonic())

    def gone(self, reading: ContentReference) -> None:
        """Nothing reads the content any more."""
        self._dead.append(reading)
        self._wake()

    def over(self, calls: list[tuple[Region, int]]) -> None:
        """Calls that named content have ended; in any thread."""
        self._dead.extend(calls)

    # ---- content

    def fill(self, length: int, site: Hashable) -> tuple[Region, memoryview] | None:
        """A region for content that `site` in the code makes for this request; None: the message has the bytes."""
        scope = SCOPE.get()
        if scope is None or length < self.threshold or not self.links:
            return None
        with self.lock:
            if scope.ended:
                return None
            destination = self._sites.get(site)
            link = scope.reply
            if destination is REPLY and link is not None and link.open:
                binding: Hashable = link.destination
            elif destination is None:
                binding = None
            elif self._services[destination]:  # type: ignore[index]  # a service, or REPLY, which is none
                binding = destination
            else:
                return None
            region = self.take(length, binding)
            if region is None:
                return None
            self.belong(scope, region)
            self._made_at[region.name] = site
            return region, region.memory.view(length)

    def take(self, length: int, binding: Hashable) -> Region | None:
        """A region to be filled, held once; None if there is no room, which is counted."""
        region = self.pool.take(length, binding)
        if region is not None and region.memory is None:
            try:
                region.memory = OwnMemory(region.size)
            except OSError as error:
                logger.warning("no shared memory of %d bytes: %s; the message carries the bytes", region.size, error)
                self.pool.remove(region)
                region = None
        self._free()
        if region is None:
            self.count("full")
        else:
            self.metrics.shared_memory_copied.inc((), length)
        return region

    def belong(self, scope: AnyScope, region: Region) -> None:
        """The content, which was taken just now, belongs to the requests of `scope` instead."""
        name, generation = region.name, region.generation
        for part in scope.parts():
            self.pool.hold(region)
            part.keep((name, generation), lambda: self.pool.let_go(name, generation, time.monotonic()))
        self.pool.let_go(name, generation, time.monotonic())

    def learn(self, region: Region, link: Link) -> None:
        """Content of a region goes over a link: so will the next that the same place in the code makes."""
        site = self._made_at.get(region.name)
        if site is not None:
            if len(self._sites) >= MAX_SITES:
                self._sites.clear()
            self._sites[site] = link.service or REPLY

    def content(self, shared: SharedContent) -> Content:
        """The content that a message of this process names. Raises ContentGone."""
        key = (shared.region, shared.generation)
        with self.lock:
            reading = self.received.get(key)
            found = None if reading is None else reading()
            if found is not None:
                return found
            region = self.pool.filled(*key)
            if region is None or shared.length > region.size:
                raise ContentGone(
                    "the content of a tensor in shared memory is gone: it belonged to a request, or call, that has "
                    f"ended, or it is an item of a stream that was read before (region {shared.region.hex()}, "
                    f"{shared.generation}); keep the array of to_numpy, or a copy, for as long as it is needed"
                )
            self.pool.hold(region)
            found = Content(key, region.memory, shared.length)
            reading = ContentReference(found, self.gone)
            self._own[id(reading)] = reading
            return found

    # ---- inside

    def _look_after(self, now: float) -> None:
        with self.lock:
            for region, links in self.pool.overdue(now):
                for link in links:
                    assert isinstance(link, Link)  # noqa: S101
                    link.ask(region.name, region.generation)
            self.pool.expire(now - IDLE_S)
            self._turn()

    def count(self, way: str, length: int = 0) -> None:
        """Count a tensor by the way that it goes, and the bytes that went by shared memory."""
        self.metrics.shared_memory_tensors.inc((way,))
        if length:
            self.metrics.shared_memory_sent.inc((), length)

    def _kernel_bytes(self) -> float:
        with self.lock:
            return sum((float(region.memory.kernel_bytes) for region in self.pool if region.memory is not None), 0.0)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True  # before the call: it may be answered before it returns
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        """Deal with what has died, and send what is queued."""
        self._woken = False
        with self.lock:
            while self._dead:
                self._bury(self._dead.popleft())
            for link in list(self.links.values()):
                link.flush()
            self._free()

    def _bury(self, dead: ContentReference | tuple[Region, int]) -> None:
        if isinstance(dead, tuple):
            region, generation = dead
            if region.generation == generation:
                region.calls -= 1
            return
        if self.received.get(dead.key) is dead:
            del self.received[dead.key]
        for link, count in dead.debts.items():
            assert isinstance(link, Link)  # noqa: S101
            link.release(*dead.key, count)
        if self._own.pop(id(dead), None) is not None:
            self.pool.let_go(*dead.key, time.monotonic())

    def _free(self) -> None:
        """Give back the memory of removed regions."""
        for region in self.pool.removed:
            self._made_at.pop(region.name, None)
            for link in region.introduced:
                link.forget(region.name)  # type: ignore[attr-defined]
            if region.memory is not None:
                region.memory.close()
        self.pool.removed.clear()


MEMORY: Memory | None = None
"""This process's; None = it shares no memory."""


def use(memory: Memory | None) -> None:
    """Make it this process's."""
    global MEMORY  # noqa: PLW0603 - tensors are made without any other argument
    MEMORY = memory
