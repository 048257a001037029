"""Polls an async iterator for its next item, without waiting and without a task.

An available item is the result of the first step of `__anext__`; otherwise the step yields a future to wait for. That
future is kept, and passed to the event loop when the item is awaited: the iterator sees no difference.
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterable, AsyncIterator, Generator
from typing import Any, Final, Generic, NoReturn, TypeVar, cast

T = TypeVar("T")


class NoItemYet:
    """The type of `NOT_YET`, which `Polled.poll` returns while there is no item."""


NOT_YET: Final = NoItemYet()


class Polled(Generic[T]):
    """An async iterator that can be polled. For one task; not to be shared."""

    def __init__(self, source: AsyncIterable[T]) -> None:
        self._iterator: AsyncIterator[T] = aiter(source)
        self._next = self._iterator.__anext__
        self._step: Generator[Any, Any, T] | None = None
        """The `__anext__` that waits."""
        self._waits_for: Any = None

    def poll(self) -> T | NoItemYet:
        """The next item, or NOT_YET: call `wait` next then. Raises StopAsyncIteration, and what the iterator raises."""
        step: Any = self._next()
        with_await = getattr(step, "__await__", None)
        if with_await is not None:  # else it is a coroutine made of a generator, which is stepped itself
            step = with_await()
        try:
            self._waits_for = step.send(None)
        except StopIteration as done:
            return cast("T", done.value)
        self._step = step
        return NOT_YET

    @types.coroutine
    def wait(self, error: BaseException | None = None) -> Generator[Any, Any, T]:
        """Wait for the item that was not available; with `error`, raise that where the iterator waits."""
        step: Any = self._step
        found, self._waits_for = self._waits_for, None
        try:
            if error is not None:
                found = step.throw(error)
            while True:
                try:
                    sent = yield found
                except BaseException as raised:  # a cancellation has to reach the code that waits in the iterator
                    found = step.throw(raised)
                else:
                    found = step.send(sent)
        except StopIteration as done:
            return cast("T", done.value)
        finally:
            self._step = None

    async def fail(self, error: BaseException) -> NoReturn:
        """Raise an error that occurred between `poll` and `wait`, first inside the iterator, then here."""
        if self._step is not None:
            await self.wait(error)
        raise error
