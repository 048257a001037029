"""Admission: counts the requests in flight of this replica, and refuses requests beyond the limit before any work."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pierhead.errors import Backpressure, Draining, PierheadError
from pierhead.tasks import next_change, wake_all


class Admission:
    """Counts the requests in flight of one replica, all kinds together. Owned by one event loop, without locks.

    A request is between `enter` and `leave`; callers put `leave` into a `finally`, so a cancelled request never leaks:

        refusal = admission.enter()
        if refusal is not None: ...answer it...
        try: ...work...
        finally: admission.leave()
    """

    def __init__(self, max_ongoing_requests: int, name: str = "this replica") -> None:
        self.max_ongoing_requests = max_ongoing_requests
        self.ongoing = 0
        self.draining = False
        self.asleep = False
        """Nothing is admitted: the replica sleeps, or is to."""
        self._name = name
        self._queue: deque[Callable[[], None]] = deque()
        self._idle_waiters: list[asyncio.Future[None]] = []

    def enter(self) -> PierheadError | None:
        """Admit the request; returns None, or the error with which it is refused, and then counts nothing."""
        if self.draining:
            return Draining(f"{self._name} is draining: it finishes its requests and takes no new ones; call another")
        return self.enter_while_draining()

    def enter_while_draining(self) -> PierheadError | None:
        """As `enter`, but also while draining: HTTP clients cannot choose another replica themselves."""
        if self.asleep:
            return Draining(f"{self._name} sleeps: it takes no requests until it is woken up; call another")
        if self.ongoing >= self.max_ongoing_requests:
            return Backpressure(
                f"{self._name} already works on {self.ongoing} requests "
                f"(max_ongoing_requests = {self.max_ongoing_requests}); call another or try later"
            )
        self.ongoing += 1
        return None

    def wait(self, begin: Callable[[], None]) -> None:
        """Call `begin()` as soon as a place is free, which is then taken: first come, first served.

        For requests that `enter` has refused because the replica is full; the caller bounds how many of them wait.
        Requests that wait when a drain begins still get their places.
        """
        self._queue.append(begin)

    def stop_waiting(self, begin: Callable[[], None]) -> None:
        """Leave the queue that `wait` has joined."""
        self._queue.remove(begin)

    @property
    def waiting(self) -> int:
        """Requests in that queue."""
        return len(self._queue)

    def leave(self) -> None:
        """The request is over, however it ended."""
        if self._queue:  # its place goes to the next request
            self._queue.popleft()()
            return
        self.ongoing -= 1
        if self.ongoing == 0:
            wake_all(self._idle_waiters)

    async def wait_idle(self) -> None:
        """Return once nothing is in flight."""
        while self.ongoing:
            await next_change(self._idle_waiters)
