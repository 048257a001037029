"""Names the code that blocks the event loop, and for how long.

    Detector   pure: what a series of looks at a loop says
    Watchdog   a thread that looks, and tells what the detector found

A look costs the loop nothing: the thread reads what the loop's thread executes. Only when that is not waiting for
events a probe is sent, a callback that says when the loop got to it. A loop that has many short things to do is late
too, but then somebody else is found at work each time: that shows as lag, and nobody is blamed.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any, Literal, NamedTuple

from pierhead.metrics import RuntimeMetrics
from pierhead.replica.blame import Place, place_of, request_of, stack_of
from pierhead.request import CURRENT

logger = logging.getLogger("pierhead")

BLOCKED_S = 0.2
"""A callback that runs for so long is told of: people notice a fifth of a second, and every request waits behind it."""

PERIOD_S = 0.1
"""Between two looks: blocks of BLOCKED_S and this are never missed, and what is told is at most this much too short. An
idle replica uses 0.08 % of a processor to look so often, nearly all of it for waking up."""

LAG_SPAN_S = 15.0
"""The lag that is shown is the largest of at least this time: as long as Prometheus leaves between two scrapes."""

QUIET_S = 60.0
"""A place that was told of is told of again after this time; until then its blocks are counted."""


class Look(NamedTuple):
    """What is seen at one moment."""

    at: float
    """`time.monotonic()` seconds, as all times here."""
    waits: bool
    """Whether the loop waits for events."""
    who: object = None
    """The task, or the code, that runs; compared with `==`."""
    answered_at: float | None = None
    """When the loop ran the probe that is out; None when it has not."""
    cpu_s: float = 0.0
    """Processor time that the whole process has used."""


class Finding(NamedTuple):
    """What a look has brought out."""

    kind: Literal["began", "ended", "stood still"]
    length_s: float
    """So far."""


class Detector:
    """Decides from looks at a loop, one every PERIOD_S, whether something blocks it. Pure."""

    def __init__(self, blocked_s: float = BLOCKED_S, period_s: float = PERIOD_S) -> None:
        self._blocked_s = blocked_s
        self._period_s = period_s
        self._last: Look | None = None
        self._sent_at: float | None = None
        self._who: object = None
        self._same = True
        """Whether each look since the probe was sent has found the same at work."""
        self._told = False
        self.total_s = 0.0
        """All blocks that have ended, together."""
        self.lag = RecentMax(LAG_SPAN_S)

    def look(self, look: Look) -> Finding | None:
        """Take a look into account."""
        last, self._last = self._last, look
        if last is not None and not self._told:
            gap = look.at - last.at - self._period_s
            if gap >= self._blocked_s:
                return self._stood_still(gap, look.cpu_s - last.cpu_s, look.at)
        if self._sent_at is None:
            return None
        if look.answered_at is not None:
            return self._answered(look.answered_at - self._sent_at, look.at)
        waited = look.at - self._sent_at
        self._same = self._same and look.who == self._who
        if self._told or not self._same or waited < self._blocked_s:
            return None
        self._told = True
        return Finding("began", waited)

    def wants_probe(self) -> bool:
        """Whether a probe is to be sent now; it then counts as sent at the last look."""
        look = self._last
        if look is None or look.waits or self._sent_at is not None:
            return False
        self._sent_at, self._who, self._same = look.at, look.who, True
        return True

    def shown_lag_s(self, now: float) -> float:
        """How late the loop was lately, at most, with a probe that is still out."""
        out = 0.0 if self._sent_at is None else max(0.0, now - self._sent_at)
        return max(self.lag.value(now), out)

    def _answered(self, lag_s: float, at: float) -> Finding | None:
        self._sent_at = None
        self.lag.add(at, lag_s)
        if not self._told:
            return None
        self._told = False
        self.total_s += lag_s
        return Finding("ended", lag_s)

    def _stood_still(self, gap_s: float, cpu_s: float, at: float) -> Finding | None:
        """Nobody in this process could look: code that kept the interpreter to itself, or no processor to run on."""
        self._sent_at = None
        if cpu_s < gap_s / 2:
            return None  # it was stopped, or others had the processors
        self.lag.add(at, gap_s)
        self.total_s += gap_s
        return Finding("stood still", gap_s)


class RecentMax:
    """The largest value of the last `span_s` to 2 `span_s` seconds. Pure."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._turn_number = 0
        self._now = self._before = 0.0

    def add(self, at: float, value: float) -> None:
        """Take a value into account."""
        self._turn(at)
        self._now = max(self._now, value)

    def value(self, at: float) -> float:
        """The largest value; 0 when there was none."""
        self._turn(at)
        return max(self._now, self._before)

    def _turn(self, at: float) -> None:
        number = int(at // self._span_s)
        if number != self._turn_number:
            self._before = self._now if number == self._turn_number + 1 else 0.0
            self._now, self._turn_number = 0.0, number


class Quiet:
    """Lets each place through once in QUIET_S, and counts what it holds back. Pure."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._known: dict[Place | None, tuple[float, int]] = {}

    def held_back(self, place: Place | None, now: float) -> int | None:
        """How many times the place was held back since it was last let through; None = this time, too."""
        told_at, held = self._known.get(place, (float("-inf"), 0))
        if now - told_at < self._quiet_s:
            self._known[place] = (told_at, held + 1)
            return None
        self._known[place] = (now, 0)
        return held


_WAITING = {
    selector.select.__code__
    for name in ("EpollSelector", "KqueueSelector", "PollSelector", "SelectSelector")
    if (selector := getattr(selectors, name, None)) is not None
}


class Watchdog:
    """Watches the running loop from a thread of its own, from `start` to `stop`, both called on that loop."""

    def __init__(self, metrics: RuntimeMetrics) -> None:
        self._loop = asyncio.get_running_loop()
        self._loops_thread = threading.get_ident()
        self._detector = Detector()
        self._quiet = Quiet()
        self._answered_at: float | None = None
        self._told: str | None = None
        """How the block that is going on was told of; None = it was not."""
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="pierhead-watchdog", daemon=True)
        metrics.loop_blocked.read = lambda: self._detector.total_s
        metrics.loop_lag.read = lambda: self._detector.shown_lag_s(time.monotonic())

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. The thread ends when it next wakes up."""
        self._stopped = True

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_S)  # half the cost of waiting for an event
            if self._stopped:
                return
            try:
                self._look()
            except Exception:
                logger.exception("internal: a look at the event loop failed")

    def _look(self) -> None:
        frame = sys._current_frames().get(self._loops_thread)
        waits = frame is None or frame.f_code in _WAITING
        who = None if waits else self._who(frame)
        finding = self._detector.look(
            Look(time.monotonic(), waits, who, self._answered_at, time.process_time()),
        )
        if finding is not None:
            self._tell(finding, None if waits else frame)
        if self._detector.wants_probe():
            self._answered_at = None
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                self._stopped = True

    def _answer(self) -> None:
        """The probe; runs on the loop."""
        self._answered_at = time.monotonic()

    def _who(self, frame: FrameType | None) -> object:
        """What runs, to be known again: the task, or where there is none the code that the loop has called."""
        task = asyncio.current_task(self._loop)
        if task is not None:
            return weakref.ref(task)  # not the task itself: its locals must not live longer because of us
        while frame is not None and frame.f_back is not None and frame.f_back.f_code.co_name != "_run":
            frame = frame.f_back
        return None if frame is None else frame.f_code

    def _tell(self, finding: Finding, frame: FrameType | None) -> None:
        if finding.kind == "ended":
            if self._told is not None:
                logger.warning("the event loop was blocked for %.2g s by %s", finding.length_s, self._told)
            self._told = None
            return
        place = place_of(frame)
        held = self._quiet.held_back(place, time.monotonic())
        if held is None:
            return
        self._note_request()
        what = str(place or "code of this process")
        request = request_of(frame)
        if request:
            what = f"{what} ({request})"
        again = f"; {held} more times there since it was last told" if held else ""
        if finding.kind == "began":
            self._told = what
            logger.warning(
                "the event loop has been blocked for %.2g s by %s, and still is%s\n%s",
                finding.length_s, what, again, stack_of(frame),
            )  # fmt: skip
        else:
            logger.warning(
                "the whole process stood still for %.2g s: something has kept Python's interpreter to itself; right "
                "after it %s runs%s\n%s",
                finding.length_s, what, again, stack_of(frame),
            )  # fmt: skip

    def _note_request(self) -> None:
        """Put the request that the loop works on into this thread's context: the log then names it."""
        task = asyncio.current_task(self._loop)
        context: Any = getattr(task, "get_context", None)  # from Python 3.12 on
        CURRENT.set(None if context is None else context().get(CURRENT))
