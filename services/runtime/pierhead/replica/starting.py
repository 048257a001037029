"""Progress reports of a replica's start, so that the controller can tell a long start from a hanging one.

    for number, shard in enumerate(shards):
        pierhead.progress("loading weights", number, len(shards))
        load(shard)

Most programs load before they call `serve()`, when no port is open yet. So the first report opens the admin port, which
the controller polls, in a thread of its own; `serve()` takes it over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping

from pierhead.errors import SettingsError
from pierhead.metrics import PROCESS
from pierhead.replica.admin import AdminServer, Readiness, admin_pages
from pierhead.settings import Settings

logger = logging.getLogger("pierhead")

MOST_STAGES = 1000
"""Most descriptions that count as progress: an endless series of new descriptions is none."""
HAND_OVER_S = 5.0


def progress(doing: str, done: float | None = None, total: float = 1.0) -> None:
    """Report what the start is doing, and how much of it is `done` of `total` (None = unknown).

    Shown by `make status` and in the events. `x-serve.startup.deadline_s` restarts at each report of progress: a new
    description, or a greater share of a known one than before. May be called from any thread, and at any rate; once
    the replica has been ready it has no effect.
    """
    START.report(doing, done, total)


class Start:
    """The reports of this process's start. `steps` changes with each progress."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._best: dict[str, float] = {}
        self._early: _EarlyAdmin | None = None
        self._served = False
        self.words = ""
        self.stage = ""
        self.steps = 0

    def report(self, doing: str, done: float | None, total: float) -> None:
        """See `progress`."""
        share = None if done is None or total <= 0 else min(max(done / total, 0.0), 1.0)
        with self._lock:
            self.stage = doing
            self.words = doing if share is None else f"{doing}, {share * 100:.0f} %"
            if doing not in self._best and len(self._best) >= MOST_STAGES:
                return
            amount = done or 0.0
            if amount > self._best.get(doing, float("-inf")):
                self._best[doing] = amount
                self.steps += 1
            # The controller polls only the processes that it has started.
            if not self._served and self._early is None and self._environ.get("PIERHEAD_REPLICA"):
                self._early = _EarlyAdmin(self)

    def hand_over(self) -> None:
        """Close the port: the replica itself listens on the admin port from now on."""
        with self._lock:
            self._served = True
            early, self._early = self._early, None
        if early is not None:
            early.close()


class _EarlyAdmin:
    """The admin port before `serve()`."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pierhead-start", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port. Never blocks the replica's start, even if the thread hangs."""
        self._listens.wait(HAND_OVER_S)
        if self._loop is not None and self._end is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(HAND_OVER_S)

    def _run(self) -> None:
        try:
            settings = Settings.from_env()
        except SettingsError:
            self._listens.set()
            return  # serve() reports the bad settings
        asyncio.run(self._listen(settings))

    async def _listen(self, settings: Settings) -> None:
        self._end, self._loop = asyncio.Event(), asyncio.get_running_loop()
        server = AdminServer(admin_pages(self._readiness, PROCESS.expose))
        try:
            await server.start(settings.host, settings.admin_port)
            if settings.admin_socket:
                await server.listen_at(settings.admin_socket)
        except (OSError, SettingsError) as error:
            logger.warning("the progress of the start cannot be reported: %s", error)
        self._listens.set()
        await self._end.wait()
        await server.close()

    def _readiness(self) -> Readiness:
        return Readiness("starting", 0, 0, self._start.words, progress=self._start.steps, stage=self._start.stage)


START = Start()
