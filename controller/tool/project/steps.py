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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

LOOK_S = 1.0
POLL_S = 0.5
LAST_LINES = 25


def step(text: str, words: Sequence[str], variables: Mapping[str, str], directory: Path) -> bool:
    """Run a program; return whether it succeeded. Where it failed, the last lines of its output are shown.

    On a terminal one line counts the seconds and shows the last line of the output; elsewhere a line is written at the
    beginning and one at the end. Raises KeyboardInterrupt at Ctrl-C, once the program has ended.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log, _timed(text) as seconds:
        status = _run(text, words, {**os.environ, **variables}, directory, log.fileno(), seconds)
        log.seek(0)
        return _end(text, log.read().splitlines(), seconds(), succeeded=status == 0)


def wait(text: str, missing: Callable[[], str], within_s: float) -> bool:
    """Look what is missing until nothing is; return whether that came in time. It is shown as a step is."""
    seen: list[str] = []
    with _timed(text) as seconds:
        while found := missing():
            if found not in seen[-1:]:
                seen.append(found)
            if seconds() >= within_s:
                return _end(text, seen, seconds(), succeeded=False)
            _tick(text, found, seconds())
            time.sleep(POLL_S)
        return _end(text, seen, seconds(), succeeded=True)


@contextlib.contextmanager
def _timed(text: str) -> Iterator[Callable[[], float]]:
    """The seconds since it began, which Ctrl-C says."""
    began = time.monotonic()
    if not sys.stdout.isatty():
        say(f"{text} ...")
    try:
        yield lambda: time.monotonic() - began
    except KeyboardInterrupt:
        _end_line()
        sys.stderr.write(f"{text}: interrupted after {time.monotonic() - began:.0f} s.\n")
        raise


def _end(text: str, output: Sequence[str], seconds: float, *, succeeded: bool) -> bool:
    _end_line()
    if succeeded:
        say(f"{text}: done ({seconds:.0f} s)")
        return True
    lines = [f"{text}: failed after {seconds:.0f} s. Its last lines:"]
    lines += [f"  | {line.rstrip()}" for line in output[-LAST_LINES:]]
    sys.stderr.write("\n".join(lines) + "\n")
    return False


def _run(
    text: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    log: int,
    seconds: Callable[[], float],
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
                _tick(text, _last_line(log), seconds())
    if interrupts:
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


def _last_line(log: int) -> str:
    size = os.fstat(log).st_size
    return "".join(os.pread(log, 512, max(0, size - 512)).decode(errors="replace").splitlines()[-1:])


def _tick(text: str, last: str, seconds: float) -> None:
    if not sys.stdout.isatty():
        return
    line = f"{text} ... {seconds:.0f} s  {''.join(filter(str.isprintable, last))}"
    sys.stdout.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
    sys.stdout.flush()


def _end_line() -> None:
    if sys.stdout.isatty():
        sys.stdout.write("\r\x1b[K")


def say(words: str) -> None:
    """Write lines to standard output at once: programs write there too."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()
