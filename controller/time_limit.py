"""Ends code that is not ours when it takes too long: the controller's event loop must go on whatever a policy does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class TookTooLong(BaseException):
    """Raised inside the code that took too long. No Exception, so that a broad `except` there does not keep it."""


def call_within(limit_s: float, call: Callable[[], T]) -> T:
    """Return what `call` does; raises TookTooLong in it after `limit_s` seconds, and again as often as it is caught.

    It ends Python code, `time.sleep` and other calls of the system, not a single long call of C. Only the main thread
    can be interrupted: elsewhere nothing is bounded. A timer that somebody else has set goes on afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    armed = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if armed:
            raise TookTooLong

    handler_before = signal.signal(signal.SIGALRM, interrupt)
    began = time.monotonic()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        try:
            return call()
        finally:
            armed = False
    finally:
        # Twice, as the signal may come between the end of the call and the first time.
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler_before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began), 0.001), interval_s)
