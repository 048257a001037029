"""The regions that one server has mapped for one connection, from before they are registered until the server has let
go of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc

from pierhead.tasks import end_tasks

RPC_TIMEOUT_S = 5.0

CLOSE_TIMEOUT_S = 5.0
"""How long a connection that closes asks the server to let go of its regions."""

RETRY_S = (0.05, 1.0)
"""Shortest and longest pause before the server is asked again to let go of a region that it still reads."""

Unregister = Callable[[], Awaitable[bool]]
"""Asks the server to unregister one region, and returns whether it has let go of it. Raises AioRpcError."""


class Registrations:
    """Owns the tasks that register and unregister."""

    def __init__(self) -> None:
        self.closed = False
        self._regions: dict[str, Unregister] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, name: str, unregister: Unregister) -> None:
        """A region is about to be registered, or is found to be."""
        self._regions[name] = unregister

    def discard(self, name: str) -> None:
        """The server refused it."""
        del self._regions[name]

    def remove(self, name: str) -> None:
        """Have the server let go of a region, as soon as it reads it no more."""
        if not self.closed:
            self.run(self._remove(name))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task, which ends with the connection."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Have the server let go of everything, within CLOSE_TIMEOUT_S; what it reads for longer stays."""
        self.closed = True
        await end_tasks(*self._tasks)  # all are asked for anew, also those that were about to be registered
        for name in self._regions:
            self.run(self._remove(name))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        await end_tasks(*self._tasks)

    async def _remove(self, name: str) -> None:
        pause, longest = RETRY_S
        while not await self._gone(name):
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _gone(self, name: str) -> bool:
        """Whether there is nothing more to ask for. A server refuses while a request of its own reads the region."""
        try:
            if not await self._regions[name]():
                return False
        except grpc.aio.AioRpcError as error:
            return self.closed and error.code() is grpc.StatusCode.UNAVAILABLE
        self._regions.pop(name, None)
        return True
