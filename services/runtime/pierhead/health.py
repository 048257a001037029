"""Is the replica well? Its parts' `check_health`, asked again and again, and what is concluded from the answers.

    Judge        pure: what a check that ended, or does not end, says
    HealthWatch  asks, and tells the replica when the judgement changes

A check that does not end in time is a failure, except where it may be waiting in the line behind accepted requests. The
line moves first come, first served, or nearly so: once twice as many requests have been answered as were in flight when
the check began, its turn was there, and the line explains nothing any more. Nor does it after `request_timeout_s`: no
accepted request may take longer than that.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from pierhead.settings import Settings

logger = logging.getLogger("pierhead")

FAILURES = 3
"""Failed checks in a row after which a replica is ill."""

LINES = 2
"""How many times the line that stood before a check must have been answered before its turn is overdue: batches and
requests of different length let some pass others."""

END_S = 1.0
"""How long a check that is cancelled at the replica's end may take to clean up."""

Check = Callable[[], Coroutine[Any, Any, Any]]


class Load(NamedTuple):
    """The replica's work at one moment."""

    ongoing: int
    answered: float
    """Requests that ended well since the replica's start."""


class Judge:
    """What checks say of a replica. Pure: times and loads are arguments."""

    def __init__(self, timeout_s: float, patience_s: float) -> None:
        self._timeout_s = timeout_s
        self._patience_s = max(timeout_s, patience_s)
        self.failures = 0
        """In a row."""

    @property
    def ill(self) -> bool:
        """Whether the replica should get no more requests."""
        return self.failures >= FAILURES

    def passed(self) -> None:
        """A check has ended well."""
        self.failures = 0

    def failed(self) -> None:
        """A check has raised, or was given up."""
        self.failures += 1

    def may_wait(self, pending_s: float, before: Load, now: Load) -> bool:
        """Whether a check that began `pending_s` ago, when the load was `before`, gets more time."""
        if pending_s < self._timeout_s:
            return True
        answered = now.answered - before.answered
        return 0 < answered < LINES * before.ongoing and pending_s < self._patience_s


def checks_of(parts: Iterable[object]) -> list[tuple[str, Check]]:
    """Each part's `check_health` with the part's name. Raises TypeError for one that is not `async def`."""
    found: list[tuple[str, Check]] = []
    for part in parts:
        check = getattr(part, "check_health", None)
        if check is None:
            continue
        if not inspect.iscoroutinefunction(check):
            raise TypeError(f"{type(part).__name__}.check_health must be `async def check_health(self) -> None`")
        found.append((type(part).__name__, check))
    return found


def _take_note(round_: asyncio.Task[None]) -> None:
    """Of how a round ended, so that nobody complains when it is given up and ends later."""
    if not round_.cancelled():
        round_.exception()


class HealthWatch:
    """Runs the checks of one replica, one round at a time. `check_all` once, then `run` for the rest of its life."""

    def __init__(
        self,
        checks: Iterable[tuple[str, Check]],
        settings: Settings,
        load: Callable[[], Load],
        judged: Callable[[str], Awaitable[None]],
        run_check: Callable[[Check], Awaitable[Any]] | None = None,
    ) -> None:
        self._checks = tuple(checks)
        self._settings = settings
        self._load = load
        self._judged = judged
        self._run_check = run_check or (lambda check: check())
        self._judge = Judge(settings.health_timeout_s, settings.request_timeout_s)

    async def check_all(self) -> None:
        """One round. Raises what the first failing check raises, with the part's name as a note."""
        for name, check in self._checks:
            try:
                await self._run_check(check)
            except Exception as error:
                error.add_note(f"raised by {name}.check_health")
                raise

    async def run(self) -> None:
        """Check every `health_period_s`; after each round `judged("")` or `judged("why it is ill")` is called.

        The replica is judged after each failed round once it is ill, and after each that passed.
        """
        round_: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(self._settings.health_period_s)
                if round_ is None or round_.done():  # user code that keeps running when cancelled is not run twice
                    round_ = asyncio.create_task(self.check_all(), name="check_health")
                    round_.add_done_callback(_take_note)
                await self._judge_round(round_)
        finally:
            if round_ is not None and not round_.done():
                round_.cancel()
                await asyncio.wait([round_], timeout=END_S)

    async def _judge_round(self, round_: asyncio.Task[None]) -> None:
        """Wait for a round's end, for as long as the judge lets it, and draw the conclusion."""
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
        reason = self._end(round_)
        if reason is None:
            judge.passed()
            await self._judged("")
            return
        judge.failed()
        logger.warning("check_health failed %d times in a row: %s", judge.failures, reason)
        if judge.ill:
            await self._judged(f"check_health failed {judge.failures} times in a row: {reason}")

    def _end(self, round_: asyncio.Task[None]) -> str | None:
        """Why the round failed; None when it passed. One that runs on is cancelled, and not waited for."""
        if not round_.done():
            round_.cancel()
            load = self._load()
            return (
                f"it has not ended within {self._settings.health_timeout_s:g} s; {load.ongoing} requests are in flight"
            )
        if round_.cancelled():
            return "it was cancelled from within"
        error = round_.exception()
        if error is None:
            return None
        return str(error) or type(error).__name__
