"""Threads for functions that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class DaemonThreads:
    """Threads for functions that may never return: a process that ends does not wait for them. Used by one thread."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, work: Callable[[], None]) -> None:
        """Call a function that raises nothing, once a thread is free. A thread is started when none is idle."""
        self._work.put(work)
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True).start()

    def close(self) -> None:
        """End the threads once they have done what was submitted."""
        for _ in range(self._started):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # what it refers to is not kept until there is other work
            self._idle.release()
