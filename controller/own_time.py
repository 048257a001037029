"""What a coroutine itself costs: the CPU time of its own steps, and how long its thread waited for a core in them.

A tick that took 300 ms of the wall clock may have computed for 10 ms. Where the rest went (to other tasks of the event
loop, to a socket, to processes that had the cores) the wall clock cannot tell; these two can.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

SCHEDSTAT = "/proc/thread-self/schedstat"


@dataclass(slots=True)
class OwnTime:
    """Seconds, so far."""

    cpu_s: float = 0.0
    core_wait_s: float = 0.0
    """The thread could have run, and another one had the core. 0 where the kernel does not count that."""


def core_wait_s() -> float:
    """Seconds that this thread has waited for a core since it began; 0 where the kernel does not count that.

    The second number of /proc/thread-self/schedstat (Documentation/scheduler/sched-stats.rst of the kernel).
    """
    try:
        file = os.open(SCHEDSTAT, os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 100).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # a kernel that was built without it
        return 0.0
    finally:
        os.close(file)


class Measured(Awaitable[T]):
    """A coroutine whose own steps are added up in `spent` while it is awaited; what others do in between is not."""

    def __init__(
        self,
        coroutine: Awaitable[T],
        spent: OwnTime,
        cpu_s: Callable[[], float] = time.thread_time,
        waited_s: Callable[[], float] = core_wait_s,
    ) -> None:
        self._coroutine = coroutine
        self._spent = spent
        self._cpu_s = cpu_s
        self._waited_s = waited_s

    def __await__(self) -> Generator[Any, Any, T]:
        """Run it, step by step, in the task that awaits."""
        steps: Generator[Any, Any, T] = self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            cpu_s, waited_s = self._cpu_s(), self._waited_s()
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self._spent.cpu_s += self._cpu_s() - cpu_s
                self._spent.core_wait_s += self._waited_s() - waited_s
            error = None
            try:
                yield waits_for
            except BaseException as thrown:
                error = thrown
