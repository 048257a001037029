"""One version of an application in processes: each begins in an interpreter that knows no other version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from pierhead.dev.described import described
from pierhead.dev.version import VersionSource
from pierhead.runner.processes import ProcessRunner
from pierhead.runner.runner import Changed, Offer, ProcessFailed


class ProcessVersion:
    """A Version of which each replica has a process."""

    def __init__(self, source: VersionSource, changed: Changed) -> None:
        self._source = source
        self._changed = changed
        self._files: Sequence[Path] = ()
        self._runner: ProcessRunner | None = None
        self._starting: asyncio.Task[Offer] | None = None
        self._stopped = False
        self._stopping: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    async def start(self) -> Offer:
        """See Version."""
        self._starting = asyncio.create_task(self._start())
        try:
            return await self._starting
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            raise ProcessFailed("it was stopped while it started") from None
        except BaseException:
            self.stop(at_once=True)
            raise

    def stop(self, *, at_once: bool) -> None:
        """See Version."""
        if not self._stopped or at_once:
            self._stopped = True
            task = asyncio.create_task(self._stop(at_once))
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def ended(self) -> None:
        """See Version."""
        await self._ended.wait()

    def files(self) -> set[Path]:
        """See Version."""
        return set(self._files)

    async def _start(self) -> Offer:
        found = await described(self._source.target)
        self._files = found.files
        self._runner = ProcessRunner(self._source.target, found.services, self._source.words(), self._changed)
        return await self._runner.start()

    async def _stop(self, at_once: bool) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._runner is not None:
            await self._runner.stop(at_once=at_once)
        self._ended.set()
