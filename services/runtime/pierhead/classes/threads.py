"""Runs `def` methods in threads: those of the event loop's executor."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from pierhead.raised import holdable
from pierhead.settings import Settings

_LEAST: Final = 32
"""Threads for other uses of the executor, such as `asyncio.to_thread`."""


def allow_threads(settings: Settings) -> None:
    """Let the running loop have a thread for each request. A thread is started when none is idle."""
    most = max(_LEAST, settings.max_ongoing_requests)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(most, "pierhead-method"))
    allow_more_threads(settings.max_ongoing_requests)


def allow_more_threads(more: int) -> None:
    """Let the running loop have more threads for `def` endpoints of Starlette and FastAPI (40, by anyio's default)."""
    if "anyio" in sys.modules:
        from anyio.to_thread import current_default_thread_limiter

        current_default_thread_limiter().total_tokens += more


async def in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function returns or raises, in a thread and in a copy of this context.

    Cancellation waits for the function's end: until then its request is in flight.
    """
    call = partial(copy_context().run, called, function, *args, **kwargs)
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.cancel():  # it has begun
            await asyncio.wait([running])
        raise


def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function returns or raises, as a future can hold it."""
    try:
        return function(*args, **kwargs)
    except (StopIteration, GeneratorExit) as error:
        raise holdable(error) from error


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
