"""Ctrl-C while a command imports its modules, which takes longer than most commands: no traceback.

For `python -m pierhead` it is imported first, and for its effect.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
"""Exit code of a command that was ended by Ctrl-C."""


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def end_at_ctrl_c() -> None:
    """From now on Ctrl-C ends this process at once and without a traceback, until a command handles it itself."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in a background job
        signal.signal(signal.SIGINT, _end)


def leave_to_commands() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_program() -> bool:
    """Whether Python looks for the module of `python -m pierhead`."""
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "pierhead"


if _is_program():
    end_at_ctrl_c()
