"""Runs `def` methods in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Final

MOST: Final = 1024
"""Threads at a time; `max_ongoing_requests` is the bound that counts. A thread is started when none is idle."""

_POOL: Final = ThreadPoolExecutor(MOST, "pierhead-method")


async def in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function returns or raises, in a thread and in a copy of this context.

    Cancellation waits for the function's end: until then its request is in flight.
    """
    call = partial(copy_context().run, function, *args, **kwargs)
    running = asyncio.get_running_loop().run_in_executor(_POOL, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.cancel():  # it has begun
            await asyncio.wait([running])
        raise
