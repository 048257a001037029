"""Passes calls, coroutines, and streams of items between two event loops, each in a thread of its own.

    Mailbox    calls into a loop; calls in quick succession wake it once
    Crossing   a coroutine that runs on the other loop and is awaited on this one
    HandOver   items that are produced on the other loop and consumed on this one, a few at a time

Everything is posted; no thread ever waits for the other one. The calls of one side arrive in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar, cast

from pierhead.raised import holdable, is_answerable
from pierhead.tasks import retrieve, wake

logger = logging.getLogger("pierhead")

T = TypeVar("T")

WINDOW = 16
"""Most items of one stream that are produced ahead of their consumer. A round trip takes about as long as producing a
few small items: more would not be faster, and items may be large."""


class Mailbox:
    """Calls into an event loop from one other thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` in the loop; does nothing when the loop is closed."""
        self._posted.append((function, args))
        if not self._woken:
            self._woken = True  # before the call: it may be answered before it returns
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        # Before reading: a call that is posted after this line wakes the loop again.
        self._woken = False
        for _ in range(len(self._posted)):
            function, args = self._posted.popleft()
            try:
                function(*args)
            except Exception:
                logger.exception("internal: a call from another event loop failed")


class Crossing(Generic[T]):
    """A coroutine that runs on the loop of `there` and is awaited on the loop of `here`, which creates this object.

    It runs in a copy of the creator's context. Cancelling the code that awaits it cancels the coroutine, and still
    waits for its end: until then the request is in flight.
    """

    def __init__(
        self, here: Mailbox, there: Mailbox, function: Callable[..., Coroutine[Any, Any, T]], *args: Any
    ) -> None:
        self._here = here
        self._there = there
        self._task: asyncio.Task[T] | None = None
        self._settled = False
        self._outcome: asyncio.Future[T] = here.loop.create_future()
        there.post(self._begin, copy_context(), function, args)

    async def result(self) -> T:
        """What the coroutine returns or raises; to be awaited once."""
        try:
            while True:
                try:
                    return await self._outcome
                except asyncio.CancelledError:
                    if self._settled:
                        raise
                    self._outcome = self._here.loop.create_future()
                    self.cancel()
        finally:
            del self  # breaks the cycle of this object, its exception, the traceback and this frame

    def cancel(self) -> None:
        """Ask the coroutine to end."""
        self._there.post(self._cancel)

    def abandon(self, error: BaseException) -> None:
        """Fail the wait for the outcome with `error`, as there will be none."""
        self._settled = True
        if not self._outcome.done():
            self._outcome.set_exception(error)

    # ---- there

    def _begin(self, context: Any, function: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]) -> None:
        self._task = self._there.loop.create_task(function(*args), context=context)
        self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._here.post(self._settle, task)

    # ---- here

    def _settle(self, task: asyncio.Task[T]) -> None:
        self._settled = True
        outcome = self._outcome
        if outcome.done():  # just cancelled, or abandoned: that is the outcome
            retrieve(task)
        elif task.cancelled():
            outcome.cancel()
        elif (error := task.exception()) is not None:
            if not is_answerable(error):  # it has ended that loop, and must not end this one
                error = RuntimeError(f"{error!r} ended the event loop that it was raised in")
            outcome.set_exception(holdable(error))
        else:
            outcome.set_result(task.result())


class HandOver(Generic[T]):
    """A stream of items from the loop of `there` to a consumer on that of `here`; at most WINDOW are ahead of it."""

    END: Any = object()

    def __init__(self, here: Mailbox, there: Mailbox) -> None:
        self._here = here
        self._there = there
        self._room = WINDOW
        self._made: asyncio.Future[None] | None = None
        """A future of the producing loop, resolved when there is room again."""
        self._items: deque[T] = deque()
        self._ended = False
        self._taken = 0
        self._news: asyncio.Future[None] | None = None

    # ---- there

    async def fill(self, start: Callable[[], AsyncIterator[T]]) -> None:
        """Send every item of the stream that `start` begins. Raises what the stream raises."""
        items = start()
        try:
            async for item in items:
                self._room -= 1
                self._here.post(self._arrive, item)
                while self._room <= 0:
                    self._made = self._there.loop.create_future()
                    await self._made
        finally:
            try:
                if hasattr(items, "aclose"):
                    await items.aclose()  # an abandoned stream ends now, not at garbage collection
            finally:
                self._here.post(self._end)

    def _credit(self, count: int) -> None:
        self._room += count
        wake(self._made)

    # ---- here

    async def next(self) -> T:
        """The next item, or END."""
        while not self._items:
            if self._ended:
                return cast("T", self.END)
            self._news = self._here.loop.create_future()
            await self._news
        item = self._items.popleft()
        self._taken += 1
        if self._taken >= WINDOW // 2:  # not for each item: a credit is a trip to the other loop
            self._there.post(self._credit, self._taken)
            self._taken = 0
        return item

    def _arrive(self, item: T) -> None:
        self._items.append(item)
        wake(self._news)

    def _end(self) -> None:
        self._ended = True
        wake(self._news)
