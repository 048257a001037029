"""Runs work that cannot be cancelled: in a thread what blocks, a download, the loading of weights.

A process waits for asyncio's own threads when it ends. A replica that is stopped during a download would run until
it is killed, and a few hanging downloads would occupy all of these threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

from pierhead.tasks import retrieve

P = ParamSpec("P")
T = TypeVar("T")

_WORKING: Final[set[asyncio.Task[Any]]] = set()
"""Work whose caller may have left: the event loop alone does not keep a task alive."""


async def in_background(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function(*args)` in a daemon thread, which does not keep the process alive; returns or raises what it does.

    If the caller is cancelled, the function still runs to its end.
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


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work, which continues to its end if the caller is cancelled."""
    task = asyncio.create_task(work)
    _WORKING.add(task)
    task.add_done_callback(_WORKING.discard)
    task.add_done_callback(retrieve)
    return await asyncio.shield(task)
