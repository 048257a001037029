"""Ctrl-C while a command imports its modules, which takes longer than most commands."""

from __future__ import annotations

import os
import signal
from typing import Final

INTERRUPTED: Final = 130
"""Exit code of a command that was ended by Ctrl-C."""


def end_at_ctrl_c() -> None:
    """From now on Ctrl-C ends this process at once and without a traceback, until a command handles it itself."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in a background job
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
