"""`python -m controller.cli`, installed in the image as `pierhead`."""

from __future__ import annotations

import os
import signal

from .errors import INTERRUPTED


def _start() -> None:
    """Import the command line, which takes longer than most commands, and run it. Ctrl-C during the import ends it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in a background job
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from .app import main

    main()


_start()
