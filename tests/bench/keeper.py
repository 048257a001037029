"""Runs one command so that nothing of it outlives the bench: `python -m tests.bench.keeper -- COMMAND...`.

The keeper is the command's subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): daemons that leave their parent, such as the
HAProxy that Ray Serve's manager starts, become the keeper's children and stay within its tree. When the keeper is asked
to stop, when the process that started it is gone (PR_SET_PDEATHSIG), or when the command ends, every process of the
tree ends: SIGTERM to the command, SIGKILL to whatever is left when its grace is over. The exit code is the command's.

Their CPU seconds are not lost when they end: the kernel adds them to the process that reaps them, which is in the tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_VARIABLE = "PIERHEAD_BENCH_GRACE_S"
"""Seconds between SIGTERM to the command and SIGKILL to everything; 0 = SIGKILL at once."""


def main() -> int:
    """Run the command line after `--`; returns its exit code."""
    command = sys.argv[sys.argv.index("--") + 1 :]
    parent = os.getppid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    stop = _Stop()
    if os.getppid() != parent:  # it was gone before the kernel was asked to tell
        return 1
    process = subprocess.Popen(command)
    code = _wait(process.pid, stop)
    if code is None:
        process.terminate()
        code = _wait(process.pid, _Deadline(float(os.environ.get(GRACE_VARIABLE, "3"))))
    _kill_tree()
    return 0 if code is None else code


class _Stop:
    """True once SIGTERM or SIGINT has come. Signals of a terminal reach the bench too, which says when to stop."""

    def __init__(self) -> None:
        self._told = False
        signal.signal(signal.SIGTERM, self._tell)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def __bool__(self) -> bool:
        return self._told


class _Deadline:
    """True once that many seconds have passed."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __bool__(self) -> bool:
        return time.monotonic() >= self._end


def _wait(pid: int, until: _Stop | _Deadline) -> int | None:
    """Reap children until `pid` has ended (its exit code) or `until` is true (None)."""
    while not until:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if ended == 0:
            time.sleep(0.05)
    return None


def _kill_tree() -> None:
    """Kill and reap until no descendant is left; those of a killed process become children of this one."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    sys.exit(main())
