"""Reads HAProxy beside the loop, so that a tick need not wait for a HAProxy that gets no core.

    a look --> due --> one reading at a time --> `reading`; a wake if it has news, unless a look takes it up

Each look asks HAProxy, since nothing tells of its changes, and waits for the answer; but not for long, and not for one
that can only come later. What it takes
then may be older than the end of an action: such an action counts as going on (`unseen`) until a reading has begun
after its end. So nobody plans for its target from a HAProxy in which its effect may be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from ..errors import ControllerError
from ..model.world import RoutingState
from ..routing.base import RoutingAction
from .patience import remaining_s

logger = logging.getLogger(__name__)

LIMIT_S = 5.0
"""Longest reading: HAProxy that says nothing for so long does not answer."""
PATIENCE_S = 0.02
"""How long a look waits for the answer: it comes within milliseconds unless others have the cores. It does not wait for
one that is not to be expected so soon, by how long the last one took: that one wakes the loop if it has news."""
NEW_S = 0.25
"""How long a reading that no look has waited for is taken as the answer to the next look."""
STALE_S = 2.0
"""Oldest reading to plan from: with an older one the next answer is awaited."""


@dataclass(frozen=True, slots=True)
class RouterReading:
    """HAProxy's part of a snapshot."""

    state: RoutingState | None
    """None = it did not answer."""
    at: float
    """When it began."""
    ended_at: float
    asked: int
    """How many looks had asked when it began."""
    changes: int
    """How many actions had ended when it began: these it has seen, if HAProxy has answered."""


@dataclass(frozen=True, slots=True)
class Question:
    """What one look has asked, and until when it waits for the answer."""

    number: int
    """0 = nothing: there were news."""
    until: float | None
    """None = for as long as it takes."""
    thorough: bool = False


class RouterWatch:
    """Keeps the newest reading. The observer is its only caller; `run` is a task."""

    def __init__(
        self,
        observe: Callable[[], Awaitable[RoutingState | None]],
        wake: Callable[[], None],
        took: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`wake` is called when a reading has ended that no look waits for, and that tells of another HAProxy or of the
        effect of an action; `took` hears how long each one took.
        """
        self._observe = observe
        self._wake = wake
        self._took = took
        self._clock = clock
        self.reading: RouterReading | None = None
        self._asked = 0
        self._changes = 0
        self._unseen: list[tuple[int, RoutingAction]] = []
        """Actions that have ended, and how many had by then."""
        self._defect: tuple[Exception, TracebackType | None] | None = None
        self._under_way: tuple[float, int] | None = None
        """When the reading that goes on began, and how many actions had ended then."""
        self._took_s = 0.0
        """How long the last reading took."""
        self._due = asyncio.Event()
        self._ended = asyncio.Event()
        """Set, and replaced, when a reading ends."""
        self._looks = 0
        self._taken: RouterReading | None = None
        """What the last look has taken."""

    @property
    def unseen(self) -> tuple[RoutingAction, ...]:
        """Actions that have ended, and whose effect the newest reading may not have seen."""
        return tuple(action for _, action in self._unseen)

    @property
    def state(self) -> RoutingState | None:
        """What the newest reading has found; None = HAProxy did not answer. Raises what it raised, a defect."""
        if self._defect is not None:
            error, trace = self._defect
            raise error.with_traceback(trace)
        return self.reading.state if self.reading else None

    def ended(self, action: RoutingAction) -> None:
        """Say that an action has ended, well or not."""
        self._changes += 1
        self._unseen.append((self._changes, action))

    async def run(self) -> None:
        """Read whenever a look asks, for ever."""
        while True:
            await self._due.wait()
            self._due.clear()
            before, is_awaited = self.reading, bool(self._unseen)
            self.reading = await self._read()
            self._took_s = self.reading.ended_at - self.reading.at
            self._took(self._took_s)
            ended, self._ended = self._ended, asyncio.Event()
            ended.set()
            has_news = before is None or before.state != self.reading.state or is_awaited
            if has_news and not self._looks:
                self._wake()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """While somebody looks nobody needs to be woken: the newest reading is taken at the end."""
        self._looks += 1
        try:
            yield
        finally:
            self._looks -= 1
            self._taken = self.reading

    async def await_reading(self, *, thorough: bool = False) -> None:
        """Return when the newest reading may be planned from: ask, and await the answer."""
        await self.await_answer(self.ask(thorough=thorough))

    def ask(self, *, thorough: bool = False) -> Question:
        """Ask HAProxy, unless a reading has just ended that no look has taken yet and that has seen every change.

        The answer is waited for: not for long, and not at all where it is not to be expected so soon; unless there is
        none before it, or too old a one. `thorough`: for as long as it takes until one has begun after this call.
        """
        if not thorough and self._is_news():
            return Question(0, None)
        self._asked += 1
        self._due.set()
        if thorough or self._is_stale():
            return Question(self._asked, None, thorough)
        now = self._clock()
        return Question(self._asked, now + PATIENCE_S if self._expected_in_s() <= PATIENCE_S else now)

    async def await_answer(self, question: Question) -> None:
        """Return when the question is answered, or not waited for any longer: the reading before will do then, unless
        it has become too old since it was asked.
        """
        await self._answered(question)
        if self._is_stale():
            await self._answered(self.ask())

    async def _answered(self, question: Question) -> None:
        while not self._answers(question.number) and (question.thorough or not self._is_news()):
            left_s = None if question.until is None else question.until - self._clock()
            if left_s is not None and left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._ended.wait()

    def _answers(self, asked: int) -> bool:
        return self.reading is not None and self.reading.asked >= asked

    def _is_news(self) -> bool:
        """Whether a reading has just ended that no look has taken, and that has seen every change."""
        last = self.reading
        if last is None or last is self._taken or last.changes != self._changes:
            return False
        return self._clock() - last.ended_at < NEW_S

    def _expected_in_s(self) -> float:
        """In how many seconds an answer that has seen every change can be expected."""
        if self._under_way is None:
            return self._took_s
        begun, changes = self._under_way
        left_s = remaining_s(self._took_s, self._clock() - begun)
        return left_s if changes == self._changes else left_s + self._took_s

    def _is_stale(self) -> bool:
        return self.reading is None or self._clock() - self.reading.at > STALE_S

    async def _read(self) -> RouterReading:
        begun, asked, changes = self._clock(), self._asked, self._changes
        self._under_way = begun, changes
        state: RoutingState | None = None
        self._defect = None
        try:
            async with asyncio.timeout(LIMIT_S):
                state = await self._observe()
        except (ControllerError, TimeoutError) as error:
            logger.debug("HAProxy does not answer: %s", str(error) or f"nothing within {LIMIT_S:g} s")
        except Exception as error:
            self._defect = error, error.__traceback__
        finally:
            self._under_way = None
        if state is not None:
            self._unseen = [(count, action) for count, action in self._unseen if count > changes]
        return RouterReading(state, begun, self._clock(), asked, changes)
