"""Reads the engine, or HAProxy, in a task outside the loop, so that no tick waits for a slow answer.

    changed, ended, a look --> due --> one reading at a time --> `reading`; wakes the loop if something changed

A look waits a moment for a new reading and then uses the last one. An action may have ended after that reading began;
it counts as in progress (`unseen`) until a reading has begun after its end. So nothing is planned for its target from a
snapshot that may lack its effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from ..errors import ControllerError
from ..outlive import Background

logger = logging.getLogger(__name__)

PATIENCE_S = 0.05
"""How long a look waits for a new reading: an idle engine has answered by then. If the last reading took longer, the
look does not wait at all; the end of the new one wakes the loop."""
REST_S = (0.02, 0.25)
"""Shortest and longest pause between two readings. In between, the pause is as long as the last reading took: an engine
that answers slowly is busy. A burst of changes causes one reading."""

T = TypeVar("T")
S = TypeVar("S")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class WatchReading(Generic[S, T]):
    """One result, with its times and its subject."""

    value: T
    at: float
    """When it began."""
    subject: S
    """The subject of the look (the Spec); compared by identity."""
    changes: int
    """How many changes were known when it began: the reading has seen these."""


@dataclass(frozen=True, slots=True)
class Question(Generic[S]):
    """What one look needs."""

    subject: S
    age_s: float
    until: float
    """How long the look waits for a new reading if the last one is usable."""
    newer: bool
    """Whether a new reading is due at all."""
    changes: int
    """How many changes the reading must have seen."""


class Watch(Generic[S, T, A]):
    """Keeps the newest reading. The observer is its only caller; `run` is a task."""

    def __init__(
        self,
        name: str,
        read: Callable[[S], Awaitable[T]],
        background: Background,
        *,
        limit_s: float,
        stale_s: float,
        took: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`limit_s`: longest reading. `stale_s`: for how long a new reading may be due before a look waits for it
        instead of taking the last one. `took` receives the seconds of each reading."""
        self._name = name
        self._read = read
        self._wake = background.wake
        self._limit_s = limit_s
        self._stale_s = stale_s
        self._took = took
        self._clock = background.clock
        self.reading: WatchReading[S, T] | None = None
        """The last one that succeeded."""
        self._failure = ""
        self._defect: tuple[Exception, TracebackType | None] | None = None
        self._question: Question[S] | None = None
        self._changes = 1
        self._unseen: list[tuple[int, A]] = []
        """Actions that have ended, and how many changes were known then."""
        self._unseen_since: float | None = None
        """When the first change was made that the newest reading may not have seen; None = it has seen all."""
        self._under_way: tuple[S, int] | None = None
        """What the current reading is of, and how many changes it has seen."""
        self._begun_at = self._ended_at = float("-inf")
        """When the last reading began, which may be the current one, and when the last one ended."""
        self._took_s = 0.0
        self._due = asyncio.Event()
        self._ended = asyncio.Event()
        """Set, and replaced, when a reading ends."""
        self._looks = 0
        self._taken: WatchReading[S, T] | None = None
        """The reading that the last look took."""

    @property
    def unseen(self) -> tuple[A, ...]:
        """Actions that have ended, and whose effect the newest reading may not have seen."""
        return tuple(action for _, action in self._unseen)

    @property
    def error(self) -> str:
        """Why the last attempt to read failed; "" if it did not. Raises the exception of a defect."""
        if self._defect is not None:
            error, trace = self._defect
            raise error.with_traceback(trace)
        return self._failure

    def changed(self) -> None:
        """Note that this part of the world has changed."""
        self._changes += 1
        if self._unseen_since is None:
            self._unseen_since = self._clock()
        self._due.set()

    def ended(self, action: A) -> None:
        """Note that an action has ended, well or not."""
        self.changed()
        self._unseen.append((self._changes, action))

    async def run(self) -> None:
        """Read whenever it is due, forever."""
        while True:
            await self._due.wait()
            self._due.clear()
            if self._question is None:
                continue  # the first look brings the subject
            has_news = await self._read_once(self._question.subject)
            ended, self._ended = self._ended, asyncio.Event()
            ended.set()
            if has_news and not self._looks:
                self._wake()
            await asyncio.sleep(self._rest_s())

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """During a look the loop need not be woken: the newest reading is taken at the look's end."""
        self._looks += 1
        try:
            yield
        finally:
            self._looks -= 1
            self._taken = self.reading

    def ask(self, subject: S, age_s: float, *, thorough: bool = False) -> Question[S]:
        """Request a reading, unless the last one has seen every change and is younger than `age_s`, or ended after the
        last look.

        `thorough`: the answer is a reading that begins after this call, however long it takes.
        """
        if thorough:
            self.changed()
        has_seen_all = self.reading is not None and not self._lacks(subject, self._changes)
        is_good = has_seen_all and (self.reading is not self._taken or self.is_fresh(subject, age_s))
        if not is_good and self._under_way != (subject, self._changes):
            self._due.set()
        patience_s = PATIENCE_S if self._expected_in_s() <= PATIENCE_S else 0.0
        changes = self._changes if thorough else 0
        self._question = Question(subject, age_s, self._clock() + patience_s, not is_good, changes)
        return self._question

    async def answer(self, question: Question[S]) -> None:
        """Return when the newest reading may be planned from, or when there is none (`error`).

        The last reading is usable if it is of this subject, not too old, and has seen the changes asked for. A new one
        is then waited for until `question.until`.
        """
        is_stale = self._is_stale(question.age_s)
        while True:
            must = is_stale or self._lacks(question.subject, question.changes)
            if not must and (not question.newer or self.reading is not self._taken):
                return
            if self._fails and not question.changes:
                must = False  # it does not answer now: the next reading that succeeds wakes the loop
            left_s = None if must else question.until - self._clock()
            if left_s is not None and left_s <= 0:
                return
            if must and self._under_way is None:
                self._due.set()
            try:
                async with asyncio.timeout(left_s):
                    await self._ended.wait()
            except TimeoutError:
                return
            is_stale = False  # after a slow reading, the next one would be as old
            if self._fails:
                return

    def is_fresh(self, subject: S, age_s: float) -> bool:
        """Whether the last reading is of this subject, younger than `age_s` and has seen every change."""
        last = self.reading
        return last is not None and not self._lacks(subject, self._changes) and self._clock() - last.at < age_s

    @property
    def _fails(self) -> bool:
        return bool(self._failure) or self._defect is not None

    def _lacks(self, subject: S, changes: int) -> bool:
        """Whether the newest reading is not of this subject, or has not seen so many changes."""
        return self.reading is None or self.reading.subject is not subject or self.reading.changes < changes

    def _rest_s(self) -> float:
        return min(max(self._took_s, REST_S[0]), REST_S[1])

    def _expected_in_s(self) -> float:
        """The estimated seconds until a reading ends: it takes as long as the last one, and if it has already taken
        longer, as long again."""
        now = self._clock()
        if self._under_way is None:
            return max(0.0, self._ended_at + self._rest_s() - now) + self._took_s
        so_far_s = now - self._begun_at
        return self._took_s - so_far_s if so_far_s < self._took_s else so_far_s

    def _is_stale(self, age_s: float) -> bool:
        """Whether a new reading has been due for so long that nothing may be planned from the last one."""
        now = self._clock()
        if self.reading is not None and now - self.reading.at > age_s + self._stale_s:
            return True
        return self._unseen_since is not None and now - self._unseen_since > self._stale_s

    async def _read_once(self, subject: S) -> bool:
        """Read; return whether the reading is news to the loop."""
        before, failed, awaited = self.reading, self._fails, bool(self._unseen)
        changes, self._begun_at = self._changes, self._clock()
        self._under_way = subject, changes
        failure, self._defect = "", None
        try:
            async with asyncio.timeout(self._limit_s):
                value = await self._read(subject)
        except ControllerError as error:
            failure = str(error) or type(error).__name__
        except TimeoutError:
            failure = f"{self._name} does not answer within {self._limit_s:g} s"
        except Exception as error:  # a defect: the next look raises it
            self._defect = error, error.__traceback__
        else:
            self.reading = WatchReading(value, self._begun_at, subject, changes)
            self._unseen = [(count, action) for count, action in self._unseen if count > changes]
            self._unseen_since = self._begun_at if self._changes > changes else None
        finally:
            self._under_way = None
        if failure and failure != self._failure:
            logger.warning("%s cannot be read: %s", self._name, failure)
        self._failure = failure
        self._ended_at = self._clock()
        self._took_s = self._ended_at - self._begun_at
        self._took(self._took_s)
        if self._fails or failed:
            return failed != self._fails
        return awaited or before is None or self.reading is None or before.value != self.reading.value
