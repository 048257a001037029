"""What the programs of these tests do in addition to serving and calling."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_the_test() -> None:
    """Have the kernel kill this process when the one that started it dies: a test that is killed leaves nothing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def memory() -> dict[str, int]:
    """What this process holds: bytes that are resident, blocks that Python has allocated, objects that its garbage
    collector sees.
    """
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
    }
