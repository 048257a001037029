"""Work that blocks and cannot be cancelled: a download, the loading of weights.

A process waits for asyncio's own threads when it ends. A replica that is stopped while it downloads would go on until
it is killed, and a few downloads that hang would occupy all of these threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_background(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args)` in a thread of its own that keeps no process from ending; returns or raises what it does.

    If the caller is cancelled, the function goes on until it ends by itself.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle_later(settle: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the caller
            loop.call_soon_threadsafe(lambda: None if result.done() else settle(value))

    def work() -> None:
        try:
            value = context.run(function, *args, **kwargs)
        except BaseException as error:  # SystemExit too: the caller raises it
            settle_later(result.set_exception, error)
        else:
            settle_later(result.set_result, value)

    threading.Thread(target=work, name="background", daemon=True).start()
    return await result
