"""Runs `def` methods in threads: those of the event loop's executor."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
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
    """What a function returns or raises, in a thread and a copy of this context. Cancellation waits for its end."""
    submit = partial(asyncio.get_running_loop().run_in_executor, None)
    return await in_thread_of(submit, partial(function, *args, **kwargs))


async def in_thread_of(submit: Callable[[Callable[[], None]], object], function: Callable[[], Any]) -> Any:
    """As `in_thread`; `submit(work)` has a thread call `work`."""
    done: Future[Any] = Future()
    context = copy_context()

    def work() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            result = context.run(function)
        except BaseException as error:
            done.set_exception(holdable(error))
        else:
            done.set_result(result)

    submit(work)
    running = asyncio.wrap_future(done)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not done.cancel():  # it has begun
            await asyncio.wait([running])
        raise
