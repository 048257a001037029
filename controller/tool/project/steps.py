"""A step: another program runs to its end, its output is kept aside, and the seconds that it takes are shown."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LOOK_S = 1.0
LAST_LINES = 25


def step(text: str, words: Sequence[str], variables: Mapping[str, str], directory: Path) -> bool:
    """Run a program; return whether it succeeded. Where it failed, the last lines of its output are shown.

    On a terminal one line counts the seconds and shows the last line of the output; elsewhere a line is written at the
    beginning and one at the end. Raises KeyboardInterrupt at Ctrl-C, once the program has ended.
    """
    began = time.monotonic()
    if not sys.stdout.isatty():
        _say(f"{text} ...")
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        status = _run(text, words, {**os.environ, **variables}, directory, log.fileno(), began)
        took = f"{time.monotonic() - began:.0f} s"
        if status == 0:
            _say(f"{text}: done ({took})")
            return True
        log.seek(0)
        lines = [f"{text}: failed after {took}. Its last lines:"]
        lines += [f"  | {line.rstrip()}" for line in log.read().splitlines()[-LAST_LINES:]]
        sys.stderr.write("\n".join(lines) + "\n")
        return False


def _run(
    text: str, words: Sequence[str], environment: Mapping[str, str], directory: Path, log: int, began: float
) -> int:
    try:
        process = subprocess.Popen(
            words, env=environment, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    except OSError as error:
        os.write(log, f"{words[0]}: {error.strerror}\n".encode())
        return 127
    with process, interrupts_wait() as interrupts:
        while True:
            try:
                status = process.wait(LOOK_S)
                break
            except subprocess.TimeoutExpired:
                _tick(text, log, time.monotonic() - began)
        _end_line()
    if interrupts:
        sys.stderr.write(f"{text}: interrupted after {time.monotonic() - began:.0f} s.\n")
        raise KeyboardInterrupt
    return status


@contextlib.contextmanager
def interrupts_wait() -> Iterator[list[int]]:
    """Ctrl-C reaches the program as well, which ends by itself; what it does at its end is waited for."""
    interrupts: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _tick(text: str, log: int, seconds: float) -> None:
    if not sys.stdout.isatty():
        return
    size = os.fstat(log).st_size
    tail = os.pread(log, 512, max(0, size - 512)).decode(errors="replace").splitlines()
    last = "".join(character for character in (tail[-1] if tail else "") if character.isprintable())
    line = f"{text} ... {seconds:.0f} s  {last}"
    sys.stdout.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
    sys.stdout.flush()


def _end_line() -> None:
    if sys.stdout.isatty():
        sys.stdout.write("\r\x1b[K")


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()
