"""`dev`: the front, the version that serves, and the next one whenever a file is saved."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from pierhead.classes.shapes import CannotTravel
from pierhead.classes.target import NoService, NoTarget
from pierhead.dev.saves import LOOK_S, Stamps, difference, named, saved, stamps
from pierhead.dev.version import Version, VersionFailed, VersionSource
from pierhead.runner.front import Front
from pierhead.runner.options import NoOptions
from pierhead.runner.runner import Changed, NoApplication, Offer, ProcessFailed
from pierhead.tracebacks import user_traceback, where

END_S = 12.0
"""How long all may take to end after Ctrl-C: a service's `aclose` has 10 s."""

TOLD = (NoApplication, NoService, NoOptions, ProcessFailed)
"""What needs no traceback."""

Say = Callable[[str], object]


class DevServer:
    """Serves the newest version that starts. Owned by one event loop; `run` ends on SIGINT and SIGTERM."""

    def __init__(
        self, source: VersionSource, make: Callable[[VersionSource, Changed], Version], front: Front, say: Say
    ) -> None:
        self._source = source
        self._make = make
        self._front = front
        self._say = say
        self._serving: Version | None = None
        self._number = 0
        """Of the version that serves."""
        self._failed = False
        """Whether the newest one has failed."""
        self._addresses: tuple[str, str] = ("", "")
        self._draining: dict[asyncio.Task[None], Version] = {}
        self._stop = asyncio.Event()

    async def run(self, http: str, grpc: str) -> None:
        """Serve until a stop signal; `http` and `grpc` are what to print as addresses. Raises NoTarget."""
        self._addresses = (http, grpc)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        working = asyncio.create_task(self._work(), name="reload")
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        await self._end(working)
        stopping.cancel()
        if working.done() and not working.cancelled():
            working.result()

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():  # a second Ctrl-C
            os._exit(130)
        self._stop.set()

    # ---- versions

    async def _work(self) -> None:
        """Load the application, and again whenever its files have changed. Raises NoTarget."""
        while True:
            before, everything = self._look(), stamps(self._source.project.all_files())
            version, began = self._made(), time.monotonic()
            starting = asyncio.create_task(version.start())
            try:
                if await self._outlives_saves(version, starting, before):
                    await self._settled(version, starting, began)
                else:
                    starting.exception()
            except asyncio.CancelledError:
                version.stop(at_once=True)
                await asyncio.wait([starting])
                starting.exception()
                await version.ended()
                raise
            await self._changed({**(everything if self._failed else self._look()), **before})

    def _made(self) -> Version:
        """A version; requests go where its replicas are while it serves."""

        def changed(offer: Offer) -> None:
            if self._serving is version:
                self._front.switch(offer.routes, offer.grpc_port)

        version = self._make(self._source, changed)
        return version

    async def _outlives_saves(self, version: Version, starting: asyncio.Task[Offer], before: Stamps) -> bool:
        """Wait for the outcome of a start; False if a file was saved before it: the version is then stopped."""
        while not starting.done():
            await asyncio.wait([starting], timeout=LOOK_S)
            if not starting.done() and stamps(before) != before:
                version.stop(at_once=True)
                await asyncio.wait([starting])
                await version.ended()
                return False
        return True

    async def _settled(self, version: Version, starting: asyncio.Task[Offer], began: float) -> None:
        """Send requests to a version that serves; report one that does not. Raises NoTarget at the first start, as a
        save does not mend a target that was mistyped.
        """
        error = starting.exception()
        is_first = self._serving is None and not self._failed
        self._failed = error is not None
        if error is not None:
            cause = error.cause if isinstance(error, VersionFailed) else error
            ends = is_first and isinstance(cause, NoTarget)
            if not ends:
                self._report(cause)
            await version.ended()
            if ends:
                raise cause
            return
        offer, former = starting.result(), self._serving
        self._front.switch(offer.routes, offer.grpc_port)
        self._serving, self._number = version, self._number + 1
        seconds = time.monotonic() - began
        if former is None:
            self._say(self._banner(offer, seconds))
            return
        self._say(f"version {self._number} serves after {seconds:.2f} s\n")
        former.stop(at_once=False)
        task = asyncio.create_task(_collected(former))
        self._draining[task] = former
        task.add_done_callback(self._draining.pop)

    async def _end(self, working: asyncio.Task[None]) -> None:
        """End all versions at once."""
        working.cancel()
        await self._front.close()
        await asyncio.wait([working], timeout=END_S)
        draining = dict(self._draining)
        versions = [*draining.values(), *([self._serving] if self._serving is not None else [])]
        for version in versions:
            version.stop(at_once=True)
        ending = [asyncio.create_task(each.ended()) for each in versions]
        _, late = await asyncio.wait([working, *ending, *draining], timeout=END_S)
        if late:
            self._say("some of it did not end; it is cut off\n")
            os._exit(1)

    # ---- files

    def _look(self) -> Stamps:
        """The files whose change matters, in their present state."""
        files = self._serving.files() if self._serving is not None else set()
        if self._failed or self._serving is None:  # the file that is missing was not imported
            files.update(self._source.project.all_files())
        return stamps({*files, *self._source.compose_files})

    async def _changed(self, seen: dict[Path, tuple[int, int]]) -> None:
        """Return once a file has changed, and then not for a moment."""
        now = await saved(lambda: self._again(seen), seen)
        self._say(f"{named(difference(seen, now))} changed\n")

    def _again(self, seen: dict[Path, tuple[int, int]]) -> Stamps:
        """The same files now, and those that have appeared; one that was imported late is no change."""
        looked = self._look()
        if not self._failed:
            for file, stamp in looked.items():
                seen.setdefault(file, stamp)
        return {**stamps(seen.keys() - looked.keys()), **looked}

    # ---- words

    def _banner(self, offer: Offer, seconds: float) -> str:
        http, grpc = self._addresses
        lines = [(f"{http}{route.path}", route.service) for route in offer.routes]
        lines += [(address or grpc, service) for service, address in offer.grpc.items() if address or grpc]
        width = max((len(where) for where, _ in lines), default=0)
        text = "".join(f"  {where:<{width}}  {what}\n" for where, what in lines)
        if not offer.routes:
            text += f'  {http} has no routes; a class has one by a keyword: class Shop(Service, route="/")\n'
        return f"{self._source.target} serves after {seconds:.2f} s; Ctrl-C ends it\n{text}"

    def _report(self, error: BaseException) -> None:
        still = (
            f"version {self._number} still serves; the next save loads it again"
            if self._serving is not None
            else "waiting for a save"
        )
        known = isinstance(error, TOLD)
        self._front.fail(f"{self._source.target} could not be loaded: {error if known else where(error)}")
        if known or isinstance(error, CannotTravel):
            self._say(f"{self._source.target} could not be loaded: {error}\n{still}\n")
        else:
            self._say(f"{user_traceback(error)}\n{self._source.target} could not be loaded: {where(error)}\n{still}\n")


async def _collected(version: Version) -> None:
    """Wait until a version has ended, and free what it held."""
    await version.ended()
    gc.collect()


class QuietPoller(logging.Filter):
    """Drops what gRPC's poller logs where a process has several event loops: that a read found nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        return "PollerCompletionQueue" not in record.getMessage()
