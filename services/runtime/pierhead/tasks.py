"""Ending tasks, and waking those that wait for a change."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.5
"""How long a cancelled task may take to end before it is cancelled again."""

END_S = 10.0
"""How long the end of a servicer, its `aclose` or `close`, or of an engine may take."""


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and return when all have ended.

    A task that continues is cancelled again: grpc.aio swallows a cancellation that meets a stream being set up.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)


def retrieve(task: asyncio.Future[Any]) -> None:
    """Mark the outcome of what nobody awaits as read, or the loop would log it."""
    if not task.cancelled():
        task.exception()


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most that long; returns whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def wake(waiter: asyncio.Future[None] | None) -> None:
    """Wake the task that waits for a future, if one does."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def next_change(waiting: list[asyncio.Future[None]]) -> asyncio.Future[None]:
    """A future that the next `wake_all` of the list sets; cancelling one task does not affect the others."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting.append(waiter)
    return waiter


def wake_all(waiting: list[asyncio.Future[None]]) -> None:
    """Wake the waiting tasks, and empty the list for the next change."""
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)
    waiting.clear()
