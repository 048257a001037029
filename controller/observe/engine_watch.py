"""Reads the engine beside the loop, so that a tick need not wait for an engine that is busy.

    changed, ended, a look --> due --> one reading at a time --> `reading`; a wake, unless a look takes it up

A look takes the newest reading that is complete. It may be older than the end of an action: such an action counts as
going on (`unseen`) until a reading has begun after its end. So nobody plans for its target from a world in which its
effect may be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from ..engines.base import ClusterEngine, EngineAction, EngineState
from ..errors import EngineError
from ..model.spec import Spec
from .patience import remaining_s

LIMIT_S = 50.0
"""Longest reading; the engine's own limits are shorter."""
PATIENCE_S = 0.05
"""How long a look waits for a newer reading than the last look had: an engine that is not busy has answered by then. It
does not wait for one that is not to be expected so soon, by how long the last one took: that one wakes the loop."""
STALE_S = 5.0
"""How long a newer reading may be due before nothing is planned from the last one any more: then it is awaited."""
REST_S = (0.02, 0.25)
"""Least and longest pause between two readings. In between it is as long as the reading took: an engine that is slow to
answer has other work, and a burst of events is one reading."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The engine's part of a snapshot."""

    state: EngineState
    at: float
    """When it began."""
    spec: Spec
    """Whose services and images it is of."""
    changes: int
    """How many known changes of the engine's world had been made when it began: these it has seen."""
    noted: frozenset[str]
    """Ids of the containers of which there were notes when it began."""


class EngineWatch:
    """Keeps the newest reading. The observer is its only caller; `run` is a task."""

    def __init__(
        self,
        engine: ClusterEngine,
        noted: Callable[[], frozenset[str]],
        wake: Callable[[], None],
        took: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`wake` is called when a reading has ended that no look waits for; `took` hears how long each one took."""
        self._engine = engine
        self._noted = noted
        self._wake = wake
        self._took = took
        self._clock = clock
        self.reading: Reading | None = None
        self._error = ""
        self._defect: tuple[Exception, TracebackType | None] | None = None
        self._spec: Spec | None = None
        self._changes = 1
        self._unseen: list[tuple[int, EngineAction]] = []
        """Actions that have ended, and how many changes there were then."""
        self._unseen_since: float | None = None
        """When the first of the changes was made that the newest reading may not have seen; None = it has seen all."""
        self._under_way: tuple[Spec, int] | None = None
        """Whose reading it is that goes on, and how many changes it has seen."""
        self._begun_at = self._ended_at = float("-inf")
        """When the last reading began (the one that goes on, if one does), and when the last one before ended."""
        self._took_s = 0.0
        self._due = asyncio.Event()
        self._ended = asyncio.Event()
        """Set, and replaced, when a reading ends."""
        self._looks = 0
        self._taken: Reading | None = None
        """What the last look has taken."""

    @property
    def unseen(self) -> tuple[EngineAction, ...]:
        """Actions that have ended, and whose effect the newest reading may not have seen."""
        return tuple(action for _, action in self._unseen)

    def changed(self) -> None:
        """Say that the engine's world is another now."""
        self._changes += 1
        if self._unseen_since is None:
            self._unseen_since = self._clock()
        self._due.set()

    def ended(self, action: EngineAction) -> None:
        """Say that an action has ended, well or not."""
        self.changed()
        self._unseen.append((self._changes, action))

    async def run(self) -> None:
        """Read whenever it is due, for ever."""
        while True:
            await self._due.wait()
            self._due.clear()
            if self._spec is None:
                continue  # the first look brings it
            self._begun_at = self._clock()
            await self._read(self._spec, self._begun_at)
            self._ended_at = self._clock()
            self._took_s = self._ended_at - self._begun_at
            self._took(self._took_s)
            ended, self._ended = self._ended, asyncio.Event()
            ended.set()
            if not self._looks:
                self._wake()
            await asyncio.sleep(self._rest_s())

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """While somebody looks nobody needs to be woken: the newest reading is taken at the end."""
        self._looks += 1
        try:
            yield
        finally:
            self._looks -= 1
            self._taken = self.reading

    async def await_reading(self, spec: Spec, age_s: float, *, thorough: bool = False) -> None:
        """Return when the newest reading may be planned from, or when it cannot be had.

        One that is younger than `age_s` and has seen every change is good as it is. Else a newer one is waited for,
        but not for long, and not at all where none is to be expected so soon; unless the last look had a newer one
        already, or there is none of this spec, or it is too old.
        `thorough`: until one has begun after this call, if a change is not seen yet.
        """
        self._spec, known = spec, self._changes
        if self.is_fresh(spec, age_s):
            return
        if self._under_way != (spec, self._changes):
            self._due.set()
        changes = known if thorough else 0
        while (lacks := self._lacks(spec, changes)) or self.reading is self._taken:
            patience_s = None if lacks or self._is_stale(age_s) else PATIENCE_S
            if patience_s is not None and self._expected_in_s() > patience_s:
                return
            try:
                async with asyncio.timeout(patience_s):
                    await self._ended.wait()
            except TimeoutError:
                return
            if self.error:
                return
            if self._lacks(spec, changes):
                self._due.set()

    @property
    def error(self) -> str:
        """Why the last reading failed, in words; "" when it did not. Raises what it raised where that is a defect."""
        if self._defect is not None:
            error, trace = self._defect
            raise error.with_traceback(trace)
        return self._error

    def is_fresh(self, spec: Spec, age_s: float) -> bool:
        """Whether nothing newer needs to be read."""
        last = self.reading
        if last is None or last.spec is not spec or last.changes != self._changes:
            return False
        return self._clock() - last.at < age_s

    def _lacks(self, spec: Spec, changes: int) -> bool:
        """Whether the newest reading is not of these files, or has not seen so many changes."""
        return self.reading is None or self.reading.spec is not spec or self.reading.changes < changes

    def _rest_s(self) -> float:
        """How long the engine is left alone after a reading."""
        return min(max(self._took_s, REST_S[0]), REST_S[1])

    def _expected_in_s(self) -> float:
        """In how many seconds a reading can be expected to end."""
        now = self._clock()
        if self._under_way is not None:
            return remaining_s(self._took_s, now - self._begun_at)
        return max(0.0, self._ended_at + self._rest_s() - now) + self._took_s

    def _is_stale(self, age_s: float) -> bool:
        """Whether the newest reading has been due to be followed for so long that nothing may be planned from it."""
        now = self._clock()
        if self.reading is not None and now - self.reading.at > age_s + STALE_S:
            return True
        return self._unseen_since is not None and now - self._unseen_since > STALE_S

    async def _read(self, spec: Spec, now: float) -> None:
        changes, noted = self._changes, self._noted()
        self._under_way = spec, changes
        try:
            async with asyncio.timeout(LIMIT_S):
                images = frozenset(service.image for service in spec.services.values())
                state = await self._engine.observe(spec.project, frozenset(spec.services), images)
        except EngineError as error:
            self._error, self._defect = str(error), None
        except TimeoutError:
            self._error, self._defect = f"the Docker Engine does not answer within {LIMIT_S:g} s", None
        except Exception as error:  # a defect: the next look raises it
            self._defect = error, error.__traceback__
        else:
            self._error, self._defect = "", None
            self.reading = Reading(state, now, spec, changes, noted)
            self._unseen = [(count, action) for count, action in self._unseen if count > changes]
            self._unseen_since = now if self._changes > changes else None
        finally:
            self._under_way = None
