"""Decides whether the replica is healthy: runs its parts' `check_health` periodically and judges the results.

    Judge        pure: judges checks that ended, or do not end
    HealthWatch  runs the checks, and reports to the replica when the judgement changes

A check that does not end in time is a failure, unless it may be queued behind accepted requests. Requests are answered
about first come, first served: once twice as many have been answered as were in flight when the check began, the check
has had its turn, and the queue is no excuse. Nor is it after `request_timeout_s`: no accepted request may take longer.

One check that raises `Broken` is enough. Code that notices between two checks that something is broken calls `recheck`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from pierhead.errors import Broken
from pierhead.settings import Settings
from pierhead.tasks import is_set_within, retrieve

logger = logging.getLogger("pierhead")

FAILURES = 3
"""Consecutive failed checks after which a replica is unhealthy."""

LINES = 2
"""The check is overdue once this many times the requests in flight at its begin were answered: more than once, because
batches and requests of different length overtake others."""

MIN_PAUSE_S = 0.1
"""Shortest time between two rounds, however often `recheck` is called."""

END_S = 1.0
"""How long a check that is cancelled at the replica's end may take to clean up."""

Check = Callable[[], Coroutine[Any, Any, Any]]


class ReplicaLoad(NamedTuple):
    """The replica's work at one moment."""

    ongoing: int
    answered: float
    """Requests that ended well since the replica's start."""


class Finding(NamedTuple):
    """Why a round failed."""

    reason: str
    certain: bool = False
    """The check has raised `Broken`."""


class HealthJudge:
    """Judges a replica by its checks. Pure: times and loads are arguments."""

    def __init__(self, timeout_s: float, patience_s: float) -> None:
        self._timeout_s = timeout_s
        self._patience_s = max(timeout_s, patience_s)
        self.failures = 0
        self.broken = False
        """A check has raised `Broken`, and none has passed since."""

    @property
    def ill(self) -> bool:
        """Whether the replica should get no more requests."""
        return self.broken or self.failures >= FAILURES

    def passed(self) -> None:
        """A check has passed."""
        self.failures = 0
        self.broken = False

    def failed(self, *, certain: bool = False) -> None:
        """A check has raised, or was given up. `certain`: the replica will not recover by itself."""
        self.failures += 1
        self.broken = self.broken or certain

    def may_wait(self, pending_s: float, before: ReplicaLoad, now: ReplicaLoad) -> bool:
        """Whether a check that began `pending_s` ago, when the load was `before`, gets more time."""
        if pending_s < self._timeout_s:
            return True
        answered = now.answered - before.answered
        return 0 < answered < LINES * before.ongoing and pending_s < self._patience_s


def checks_of(parts: Iterable[object]) -> list[tuple[str, Check]]:
    """Each part's `check_health` with the part's name. Raises TypeError if one is not `async def`."""
    found: list[tuple[str, Check]] = []
    for part in parts:
        check = getattr(part, "check_health", None)
        if check is None:
            continue
        if not inspect.iscoroutinefunction(check):
            raise TypeError(f"{type(part).__name__}.check_health must be `async def check_health(self) -> None`")
        found.append((type(part).__name__, check))
    return found


_RUNNING: set[HealthWatch] = set()
"""The watches of this process: one, except in tests."""


def recheck() -> None:
    """Run `check_health` now instead of at the next period: for code that notices that something is broken.

    In such a check only `Broken` counts; any other failure is ignored. May be called from any thread, and at any rate.
    """
    for watch in list(_RUNNING):
        watch.ask()


class HealthWatch:
    """Runs the checks of one replica, one round at a time. `check_all` once, then `run` for the rest of its life."""

    def __init__(
        self,
        checks: Iterable[tuple[str, Check]],
        settings: Settings,
        load: Callable[[], ReplicaLoad],
        judged: Callable[[str], Awaitable[None]],
        run_check: Callable[[Check], Awaitable[Any]] | None = None,
    ) -> None:
        self._checks = tuple(checks)
        self._settings = settings
        self._load = load
        self._judged = judged
        self._run_check = run_check or (lambda check: check())
        self._judge = HealthJudge(settings.health_timeout_s, settings.request_timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()

    @property
    def broken(self) -> bool:
        """Whether a check was certain that the replica will not recover, and none has passed since."""
        return self._judge.broken

    def ask(self) -> None:
        """See `recheck`."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._asked.set)

    async def check_all(self) -> None:
        """One round. Raises what the first failing check raises, with the part's name as a note."""
        for name, check in self._checks:
            try:
                await self._run_check(check)
            except BaseException as error:
                error.add_note(f"raised by {name}.check_health")
                raise

    async def run(self) -> None:
        """Check every `health_period_s`; after each round `judged("")` or `judged("why it is ill")` is called.

        It is called after each failed round once the replica is unhealthy, and after each round that passed. A round of
        `recheck` in between changes nothing unless it raises `Broken`.
        """
        round_: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        _RUNNING.add(self)
        due = time.monotonic() + self._settings.health_period_s
        try:
            while True:
                counts = await self._wait(due)
                if round_ is None or round_.done():  # user code that ignores its cancellation is not run twice
                    round_ = asyncio.create_task(self.check_all(), name="check_health")
                    round_.add_done_callback(retrieve)
                finding = await self._outcome(round_)
                counts = counts or time.monotonic() >= due
                if counts or (finding is not None and finding.certain):
                    await self._conclude(finding)
                if counts:
                    due = time.monotonic() + self._settings.health_period_s
        finally:
            _RUNNING.discard(self)
            if round_ is not None and not round_.done():
                round_.cancel()
                await asyncio.wait([round_], timeout=END_S)

    async def _wait(self, due: float) -> bool:
        """Wait until a round is due, or requested; returns whether it is due."""
        await asyncio.sleep(min(MIN_PAUSE_S, max(due - time.monotonic(), 0.0)))
        is_asked = await is_set_within(self._asked, max(due - time.monotonic(), 0.0))
        self._asked.clear()
        return not is_asked

    async def _outcome(self, round_: asyncio.Task[None]) -> Finding | None:
        """Wait for a round's end, for as long as the judge lets it; None when it passed."""
        judge, timeout_s = self._judge, self._settings.health_timeout_s
        began, before = time.monotonic(), self._load()
        while not round_.done() and judge.may_wait(time.monotonic() - began, before, self._load()):
            pending_s = time.monotonic() - began
            if pending_s >= timeout_s:
                logger.warning(
                    "check_health has not ended within %.3g s; not counted yet: it may wait behind %d requests",
                    pending_s,
                    before.ongoing,
                )
            await asyncio.wait([round_], timeout=timeout_s)
        return self._end(round_)

    async def _conclude(self, finding: Finding | None) -> None:
        judge = self._judge
        if finding is None:
            judge.passed()
            await self._judged("")
            return
        known = judge.broken
        judge.failed(certain=finding.certain)
        if finding.certain:
            if not known:
                logger.error("check_health is certain that this replica is broken: %s", finding.reason)
            await self._judged(finding.reason)
            return
        logger.warning("check_health failed %d times in a row: %s", judge.failures, finding.reason)
        if judge.ill:
            await self._judged(f"check_health failed {judge.failures} times in a row: {finding.reason}")

    def _end(self, round_: asyncio.Task[None]) -> Finding | None:
        """Why the round failed; None if it passed. Cancels a round that still runs, without waiting for its end."""
        if not round_.done():
            round_.cancel()
            load = self._load()
            return Finding(
                f"it has not ended within {self._settings.health_timeout_s:g} s; {load.ongoing} requests are in flight"
            )
        if round_.cancelled():
            return Finding("it was cancelled from within")
        error = round_.exception()
        if error is None:
            return None
        return Finding(str(error) or type(error).__name__, isinstance(error, Broken))
