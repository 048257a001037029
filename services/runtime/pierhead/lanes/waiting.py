"""Wakes tasks that wait for a change. Each has a future of its own: cancelling one task does not affect the others."""

from __future__ import annotations

import asyncio


def next_change(waiting: list[asyncio.Future[None]]) -> asyncio.Future[None]:
    """A future that the next `wake_all` of the list sets."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting.append(waiter)
    return waiter


def wake_all(waiting: list[asyncio.Future[None]]) -> None:
    """Wake the waiting tasks, and empty the list for the next change."""
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)
    waiting.clear()
