"""Lines on their way to standard error: put into a bounded buffer, written by a thread of its own, many at a time.

A write to a pipe blocks when the other end is slow (Docker's log driver, a full disk). That must hold up this thread,
never the event loop. So a line that finds the buffer full is counted and dropped.

Lines come as text, formatted by the code that logs. Formatting in the thread would take the interpreter away from
the event loop, for the length of a switch interval (5 ms) at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TextIO

MAX_BUFFERED = 4 * 1024 * 1024
"""Characters that wait at most: some 20,000 lines."""

LINGER_S = 0.1
"""How long a line may wait for others. An urgent line is written at once, with all lines before it."""


class LineWriter:
    """A bounded buffer before a stream. May be used from any thread, and from a signal handler."""

    def __init__(
        self,
        stream: TextIO,
        complain: Callable[[int], str] = lambda dropped: f"{dropped} lines were dropped",
        max_buffered: int = MAX_BUFFERED,
        linger_s: float = LINGER_S,
    ) -> None:
        """`complain(n)`: the line that is written, when there is room again, in place of n that were dropped."""
        self.dropped = 0
        """Lines that found the buffer full, or could not be written, ever."""
        self._stream = stream
        self._complain = complain
        self._max_buffered = max_buffered
        self._linger_s = linger_s
        self._told = 0
        """Dropped lines that have been complained of."""
        self._closed = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # threads stay behind, and the parent writes what it has

    def _begin(self) -> None:
        self._lines: list[str] = []
        self._buffered = 0
        # Re-entrant: a destructor that logs may run within `put`.
        self._lock = threading.RLock()
        self._writing = threading.RLock()
        self._thread: threading.Thread | None = None
        self._some = threading.Event()
        self._now = threading.Event()

    def put(self, line: str, *, urgent: bool = False) -> None:
        """Have a line, without its end, written soon; at once, with all before it, when it is urgent. Never blocks."""
        with self._lock:
            if self._buffered + len(line) > self._max_buffered:
                self.dropped += 1
                return
            first = not self._lines
            self._lines.append(line)
            self._buffered += len(line)
        if first:
            self._wake()
        if urgent:
            self._now.set()

    def flush(self) -> None:
        """Write what there is, here and now; blocks as long as the stream does."""
        with self._writing:
            with self._lock:
                lines, self._lines, self._buffered = self._lines, [], 0
                untold, self._told = self.dropped - self._told, self.dropped
            if untold:
                lines.append(self._complain(untold))
            if not lines:
                return
            lines.append("")
            try:
                self._stream.write("\n".join(lines))
                self._stream.flush()
            except (OSError, ValueError):  # closed, or its other end is gone: there is no way to say so
                self.dropped += len(lines) - 1

    def close(self) -> None:
        """Write what there is and end the thread."""
        self._closed = True
        self._some.set()
        self._now.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)  # a stream that blocks must not keep the process alive
        self._thread = None
        if thread is None or not thread.is_alive():
            self.flush()

    def _wake(self) -> None:
        if self._closed:
            self.flush()  # the last words of a process
            return
        with self._lock:
            if self._thread is None:
                # A daemon: the process may end without it; `close`, at exit, writes what is left.
                self._thread = threading.Thread(target=self._run, name="pierhead log", daemon=True)
                self._thread.start()
        self._some.set()

    def _run(self) -> None:
        while not self._closed:
            self._some.wait()
            self._now.wait(self._linger_s)
            self._some.clear()
            self._now.clear()
            self.flush()
