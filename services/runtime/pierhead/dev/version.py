"""One version of an application, in a thread with an event loop of its own.

    starting --(every service is ready)--> serving --(stop)--> draining --> ended
       `--(import, constructor or check raises)--> failed

The thread imports the application's module, then runs the loop: so a slow import or constructor delays no request of
the version that still serves, and calls of one version never reach another one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

from pierhead.calls.clients import Clients, close_handles
from pierhead.classes.target import bound_at
from pierhead.classes.threads import allow_threads
from pierhead.dev.project import FolderFiles
from pierhead.metrics import RuntimeMetrics
from pierhead.multiplex.multiplexed import close_models
from pierhead.replica.watchdog import Watchdog
from pierhead.runner.in_loop import LoopRunner
from pierhead.runner.options import Options, read_words
from pierhead.runner.runner import Changed, Offer
from pierhead.settings import Settings

logger = logging.getLogger("pierhead")

THREAD = "pierhead-version"
"""The name of a version's thread."""


class Version(Protocol):
    """One version of the application, however it runs."""

    async def start(self) -> Offer:
        """Return once it serves. Raises what keeps it from it."""
        ...

    def stop(self, *, at_once: bool) -> None:
        """End it; while it starts, at once."""
        ...

    async def ended(self) -> None:
        """Return once it has ended."""
        ...

    def files(self) -> set[Path]:
        """The project's files that it was made of."""
        ...


class VersionSource(NamedTuple):
    """What a version is made of."""

    target: str
    project: FolderFiles
    compose_files: Sequence[Path] = ()

    def words(self) -> Mapping[str, Options]:
        """The words of the compose files. Raises NoOptions."""
        return read_words(self.compose_files)


class ThreadVersion:
    """A Version in this process. Created and used on one loop, its owner's."""

    def __init__(self, source: VersionSource, changed: Changed) -> None:
        """`changed`: told on the owner's loop."""
        self._source = source
        self._changed = changed
        self._owner = asyncio.get_running_loop()
        self._offer: asyncio.Future[Offer] = self._owner.create_future()
        self._ended = asyncio.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = False
        self._served = False
        self._stop: asyncio.Event
        self._now: asyncio.Event
        self._thread = threading.Thread(target=self._main, name=THREAD, daemon=True)

    async def start(self) -> Offer:
        """See Version."""
        self._thread.start()
        return await asyncio.shield(self._offer)

    def stop(self, *, at_once: bool) -> None:
        """See Version."""
        with self._lock:
            self._stop_asked = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._ask, at_once)

    async def ended(self) -> None:
        """See Version."""
        await self._ended.wait()

    def files(self) -> set[Path]:
        """See Version; those that were imported late, too."""
        return self._source.project.imported_files()

    # ---- in the thread

    def _main(self) -> None:
        failure: BaseException = RuntimeError("it was stopped while it started")
        forgotten: Mapping[str, ModuleType] = {}
        try:
            forgotten = self._source.project.forget()
            words = self._source.words()
            changed: Changed = lambda offer: self._tell(self._changed, offer)  # noqa: E731
            application = LoopRunner(bound_at(self._source.target), words, changed)
            asyncio.run(self._live(application))
        except BaseException as error:  # SystemExit, too: the owner reports it
            failure = error
            if self._served:
                logger.exception("a version could not be ended as it should be")
        if not self._served:
            self._source.project.put_back(forgotten)
        self._tell(self._failed, failure)
        self._tell(self._ended.set)

    async def _live(self, application: LoopRunner) -> None:
        loop = asyncio.get_running_loop()
        self._stop, self._now = asyncio.Event(), asyncio.Event()
        with self._lock:
            if self._stop_asked:
                return
            self._loop = loop
        Clients.use(Settings(static=Settings.from_env().static))
        allow_threads(Settings(max_ongoing_requests=application.most_ongoing))
        watchdog = Watchdog(RuntimeMetrics())
        starting = asyncio.create_task(application.start())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                offer = await starting
                self._served = True
                self._tell(self._serves, offer)
                watchdog.start()
                await stopping
                await self._end(application)
        finally:
            watchdog.stop()
            starting.cancel()
            stopping.cancel()
            await asyncio.wait([starting, stopping])
            await close_models()
            await close_handles()
            with self._lock:
                self._loop = None
            if self._served:
                self._tell(self._ended.set)  # what is left are threads of methods that block, and no one waits for them

    async def _end(self, application: LoopRunner) -> None:
        """Drain, until that is to end at once."""
        draining = asyncio.create_task(application.stop())
        now = asyncio.create_task(self._now.wait())
        await asyncio.wait([draining, now], return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        if not draining.done():
            draining.cancel()
            await asyncio.wait([draining])
            await application.stop(at_once=True)

    def _ask(self, at_once: bool) -> None:
        self._stop.set()
        if at_once:
            self._now.set()

    # ---- on the owner's loop

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        if not self._owner.is_closed():
            self._owner.call_soon_threadsafe(function, *args)

    def _serves(self, offer: Offer) -> None:
        if not self._offer.done():
            self._offer.set_result(offer)

    def _failed(self, error: BaseException) -> None:
        if not self._offer.done():
            self._offer.set_exception(VersionFailed(error))


class VersionFailed(Exception):
    """A version that does not serve; `cause` is why."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause
