"""Logs which code blocks a replica's event loop, and for how long.

A thread samples the loop's thread ten times a second. While the loop runs code, a probe is pending: a callback that
records when the loop runs it. A late probe is lag. It is a block if every sample since then has found the same task or
callback running; a loop that is late because of many short callbacks is not blocked.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from pierhead.metrics import RuntimeMetrics

logger = logging.getLogger("pierhead")

BLOCKED_S = 0.2
"""A callback that runs this long is logged: people notice a fifth of a second, and every request waits for it."""

PERIOD_S = 0.1
"""Time between two samples. They cost an idle replica 0.08 % of a processor, nearly all of it for waking up."""

LAG_SPAN_S = 15.0
"""The reported lag is the largest of at least this time: the time between two scrapes of Prometheus."""

MOST_FRAMES = 40
"""Frames of a stack in the log, from the innermost on; the others belong to servers and to Python's start."""


class Block(NamedTuple):
    """One callback or one step of a task that blocks the loop."""

    length_s: float
    is_over: bool


class Detector:
    """Decides from samples of a loop, one every PERIOD_S, whether a callback blocks it. Pure."""

    def __init__(self) -> None:
        self._sent_at: float | None = None
        self._found: object = None
        self._is_same = True
        """Whether each sample since the probe was sent has found the same code running."""
        self._is_block = False
        self.total_s = 0.0
        """The total length of all ended blocks."""
        self.lag = RecentMax(LAG_SPAN_S)

    def check(self, at: float, works: object, answered_at: float | None) -> Block | None:
        """Returns a block once when it has lasted BLOCKED_S, and once when it is over.

        `works` is the task or the code that runs, compared with `==`; None while the loop waits for events.
        `answered_at` is when the loop ran the pending probe; None = it has not. Times are monotonic seconds.
        """
        if self._sent_at is None:
            return None
        if answered_at is not None:
            return self._answered(answered_at - self._sent_at, at)
        length_s = at - self._sent_at
        self._is_same = self._is_same and works == self._found
        if self._is_block or not self._is_same or length_s < BLOCKED_S:
            return None
        self._is_block = True
        return Block(length_s, is_over=False)

    def wants_probe(self, at: float, works: object) -> bool:
        """Whether a probe is to be sent after this sample; it then counts as sent `at`."""
        if works is None or self._sent_at is not None:
            return False
        self._sent_at, self._found, self._is_same = at, works, True
        return True

    def shown_lag_s(self, now: float) -> float:
        """The largest recent lag of the loop, a pending probe included."""
        out = 0.0 if self._sent_at is None else max(0.0, now - self._sent_at)
        return max(self.lag.value(now), out)

    def _answered(self, lag_s: float, at: float) -> Block | None:
        self._sent_at = None
        self.lag.add(at, lag_s)
        if not self._is_block:
            return None
        self._is_block = False
        self.total_s += lag_s
        return Block(lag_s, is_over=True)


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
        self._answered_at: float | None = None
        self._blocked_by = ""
        self._stacks_logged: set[str] = set()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="pierhead-watchdog", daemon=True)
        metrics.loop_blocked.read = lambda: self._detector.total_s
        metrics.loop_lag.read = lambda: self._detector.shown_lag_s(time.monotonic())

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling. The thread ends when it next wakes up."""
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
        works = None if frame is None or frame.f_code in _WAITING else self._at_work(frame)
        now = time.monotonic()
        block = self._detector.check(now, works, self._answered_at)
        if block is not None:
            self._log(block, frame)
        if self._detector.wants_probe(now, works):
            self._answered_at = None
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                self._stopped = True

    def _answer(self) -> None:
        """The probe; runs on the loop."""
        self._answered_at = time.monotonic()

    def _at_work(self, frame: FrameType) -> object:
        """The running task, else the code of the running callback."""
        task = asyncio.current_task(self._loop)
        if task is not None:
            return weakref.ref(task)  # weak: the watchdog must not keep the task's locals alive
        while frame.f_back is not None and frame.f_back.f_code.co_name != "_run":
            frame = frame.f_back
        return frame.f_code

    def _log(self, block: Block, frame: FrameType | None) -> None:
        if block.is_over or frame is None:
            logger.warning("the event loop was blocked for %.2g s by %s", block.length_s, self._blocked_by)
            return
        self._blocked_by = line_of(frame)
        if self._blocked_by in self._stacks_logged:
            return
        self._stacks_logged.add(self._blocked_by)
        logger.warning(
            "the event loop has been blocked for %.2g s by %s, and still is\n%s",
            block.length_s, self._blocked_by, "".join(traceback.format_stack(frame)[-MOST_FRAMES:]).rstrip(),
        )  # fmt: skip


_NOT_THE_SERVICE_S = tuple(
    {
        f"{path}/"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name)) is not None
    }
    | {f"{Path(__file__).parents[1]}/", "<frozen"}
)


def line_of(frame: FrameType) -> str:
    """The current line of a stack: the innermost line of the service's own code, else the innermost one."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith(_NOT_THE_SERVICE_S):
        found = found.f_back
    at = found or frame
    return f"{at.f_code.co_filename}:{at.f_lineno} {at.f_code.co_qualname}"
