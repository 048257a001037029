"""Polls the API and shows progress until a verdict is final, the timeout is over, or Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from .errors import BAD_INPUT, BadInput, CommandError, NotYet, TimedOut, Unreachable
from .output import Console
from .progress import Progress
from .wait import TargetMovedError, WaitVerdict

T = TypeVar("T")

POLL_S = 0.3
GIVE_UP_SILENT_S = 20.0
"""A controller that restarts answers again well within this time."""
REASONS_AFTER_S = 5.0
"""A longer wait shows its reasons. Most replicas are ready before."""
HOPELESS_LOOKS = 2
"""A single verdict may be outdated: a GPU, for example, may have become free since."""


def wait(look: Callable[[], WaitVerdict], timeout_s: float, stays: str, *, quiet: bool = False) -> WaitVerdict:
    """Poll until the verdict is final, show progress, and return the verdict if it is the wanted one.

    `stays`: the sentence about what continues after the wait ends early; `quiet`: show only obstacles.

    Raises CommandError and its kinds for any other end.
    """
    progress = Progress(Console(stderr=True, highlight=False), quiet=quiet)
    try:
        with progress:
            verdict = _look_until_final(look, timeout_s, progress)
    except KeyboardInterrupt:
        raise CommandError(f"Stopped waiting. {stays}") from None
    except TargetMovedError as error:
        raise CommandError(str(error)) from None
    if verdict.done:
        return verdict
    if verdict.hopeless:
        kind = BadInput if verdict.exit_code == BAD_INPUT else CommandError
        goes_on = "" if verdict.ended else stays
        raise kind("\n".join(line for line in (verdict.message, verdict.next_step, goes_on) if line))
    raise TimedOut(f"not done after {timeout_s:g} s: {verdict.message}\n{stays}")


def patiently(ask: Callable[[], T]) -> T:
    """Retry for GIVE_UP_SILENT_S while the controller does not answer or is not ready: it may be restarting."""
    deadline = time.monotonic() + GIVE_UP_SILENT_S
    while True:
        try:
            return ask()
        except (Unreachable, NotYet):
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_S)


def _look_until_final(look: Callable[[], WaitVerdict], timeout_s: float, progress: Progress) -> WaitVerdict:
    began = time.monotonic()
    hopeless_looks = 0
    while True:
        verdict = patiently(look)
        if not (verdict.done or verdict.hopeless):  # the caller reports the end, once
            progress.show(verdict, reasons=time.monotonic() >= began + REASONS_AFTER_S)
        hopeless_looks = hopeless_looks + 1 if verdict.hopeless else 0
        late = time.monotonic() >= began + timeout_s
        if verdict.done or hopeless_looks >= HOPELESS_LOOKS or late:
            return verdict
        time.sleep(POLL_S)
