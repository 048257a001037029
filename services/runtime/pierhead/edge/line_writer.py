"""Writes log lines to standard error without blocking: a bounded buffer, and a thread that writes many lines at a time.

A write to a pipe blocks when the other end is slow (Docker's log driver, a full disk). It may block only this thread,
never the event loop. So when the buffer is full, a line is counted and dropped.

The code that logs formats the lines. Formatting in the thread would take the interpreter from
the event loop, for a switch interval (5 ms) at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TextIO

MAX_BUFFERED = 4 * 1024 * 1024
"""Characters that the buffer holds: some 20,000 lines."""

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
        """`complain(n)`: the line that is written, once there is room again, in place of n dropped lines."""
        self.dropped = 0
        """Lines dropped since the start: the buffer was full, or the write failed."""
        self._stream = stream
        self._complain = complain
        self._max_buffered = max_buffered
        self._linger_s = linger_s
        self._reported = 0
        self._closed = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # a fork has no thread; the parent writes its lines

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
        """Queue a line, without its line end. An urgent one is written at once, with all before it. Never blocks."""
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
        """Write all buffered lines now; blocks as long as the stream does."""
        with self._writing:
            with self._lock:
                lines, self._lines, self._buffered = self._lines, [], 0
                unreported, self._reported = self.dropped - self._reported, self.dropped
            if unreported:
                lines.append(self._complain(unreported))
            if not lines:
                return
            lines.append("")
            try:
                self._stream.write("\n".join(lines))
                self._stream.flush()
            except (OSError, ValueError):  # closed, or its reader is gone: there is nowhere to report it
                self.dropped += len(lines) - 1

    def close(self) -> None:
        """Write all buffered lines and end the thread."""
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
            self.flush()  # the process is ending: no thread can be started
            return
        with self._lock:
            if self._thread is None:
                # A daemon: the process may end without it; `close`, at exit, writes the rest.
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
