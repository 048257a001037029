"""Threads for functions that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class DaemonThreads:
    """Threads for functions that may never return: a process that ends does not wait for them. Used by one thread."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """What a function returns or raises, once a thread is free. A thread is started when none is idle."""
        future: Future[Any] = Future()
        self._work.put((future, function))
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True).start()
        return future

    def close(self) -> None:
        """End the threads once they have done what was submitted."""
        for _ in range(self._started):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            _settle(*work)
            del work  # what it refers to is not kept until there is other work
            self._idle.release()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
