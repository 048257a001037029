"""What the processes of one replica know of each other: a few numbers for each worker, in memory that all share.

Each number has one writer, the worker whose seat it is; only of one that has ended the supervisor clears them. They are
eight bytes and aligned, so nobody ever reads half of one.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from enum import IntEnum
from typing import NamedTuple

from pierhead.replica.user_config import ConfigReport

WORD = 8
COLUMNS = 9
DETAIL_BYTES = 512
TEXTS = 2
"""Of DETAIL_BYTES each, for each worker: why it is ill, and why its user_config was refused."""


class WorkerState(IntEnum):
    """What a worker says of itself."""

    ABSENT = 0
    """Not there, or not listening yet."""
    READY = 1
    ILL = 2
    """It listens, and its health checks fail."""
    DRAINING = 3
    BROKEN = 4
    """As ILL, and it knows that it will not get well."""


class Numbers(NamedTuple):
    """What a worker counts beside what it has in flight."""

    queued: int = 0
    answered: int = 0
    errors: int = 0
    progress: int = 0


class Seen(NamedTuple):
    """One worker at one moment."""

    state: WorkerState
    ongoing: int
    queued: int
    beat_s: float
    """When its event loop was last known to run, by `time.monotonic()`, which all processes share."""
    detail: str
    answered: int = 0
    errors: int = 0
    progress: int = 0
    config: ConfigReport | None = None
    """None while it has told none."""


class Board:
    """The shared memory, by a file descriptor that workers inherit."""

    def __init__(self, descriptor: int, workers: int) -> None:
        self.descriptor = descriptor
        self.workers = workers
        memory = memoryview(mmap.mmap(descriptor, _size(workers)))
        words = memory[: COLUMNS * workers * WORD].cast("q")
        columns = [words[number * workers : (number + 1) * workers] for number in range(COLUMNS)]
        self.ongoing, self.queued, self._answered, self._errors, self._progress, self._state, self._beat = columns[:7]
        self._wanted, self._applied = columns[7:]
        self._details = memory[COLUMNS * workers * WORD :]

    @classmethod
    def make(cls, workers: int) -> Board:
        """Memory for so many workers, all of them absent."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("pierhead-workers")
        else:  # not Linux
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _size(workers))
        return cls(descriptor, workers)

    def close(self) -> None:
        """Let go of the descriptor; who has the memory keeps it."""
        os.close(self.descriptor)

    def tell(self, index: int, state: WorkerState, detail: str = "") -> None:
        """A worker says how it is."""
        self._write(index, detail)
        self._state[index] = state

    def configure(self, index: int, report: ConfigReport) -> None:
        """A worker says which user_config it has."""
        self._write(self.workers + index, report.error)
        self._applied[index], self._wanted[index] = int(report.applied, 16), int(report.wanted, 16)

    def beat(self, index: int, now_s: float) -> None:
        """A worker's event loop runs."""
        self._beat[index] = int(now_s * 1e9)

    def count(self, index: int, numbers: Numbers) -> None:
        """A worker says what it counted."""
        self.queued[index], self._answered[index], self._errors[index], self._progress[index] = numbers

    def clear(self, index: int) -> None:
        """The worker of that seat has ended."""
        self.tell(index, WorkerState.ABSENT)
        self.count(index, Numbers())
        self.ongoing[index] = self._beat[index] = self._wanted[index] = self._applied[index] = 0

    def seen(self) -> list[Seen]:
        """Every worker, now."""
        return [
            Seen(
                WorkerState(self._state[index]),
                self.ongoing[index],
                self.queued[index],
                self._beat[index] / 1e9,
                self._detail(index),
                self._answered[index],
                self._errors[index],
                self._progress[index],
                self._config(index),
            )
            for index in range(self.workers)
        ]

    def _config(self, index: int) -> ConfigReport | None:
        if not self._wanted[index]:
            return None
        wanted, applied = f"{self._wanted[index]:012x}", f"{self._applied[index]:012x}"
        return ConfigReport(wanted, applied, self._detail(self.workers + index))

    def _write(self, place: int, text: str) -> None:
        start = place * DETAIL_BYTES
        raw = text.encode(errors="backslashreplace")  # the name of a file, say, may have no UTF-8
        self._details[start : start + DETAIL_BYTES] = raw[:DETAIL_BYTES].ljust(DETAIL_BYTES, b"\0")

    def _detail(self, place: int) -> str:
        raw = bytes(self._details[place * DETAIL_BYTES : (place + 1) * DETAIL_BYTES])
        return raw.partition(b"\0")[0].decode(errors="replace")


def _size(workers: int) -> int:
    return workers * (COLUMNS * WORD + TEXTS * DETAIL_BYTES)
