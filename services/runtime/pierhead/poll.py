"""Looking whether an async iterator has its next item already, without waiting and without a task.

An item that is there comes out of `__anext__` at the first step; one that is not makes it give a future to wait for.
That future is kept, and handed to the event loop when the item is awaited: the iterator sees nothing unusual.
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterable, AsyncIterator, Generator
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar, cast, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class ReadsReady(Protocol[T]):
    """A stream that gives what has arrived in one go, which is cheaper than item by item."""

    def read_ready(self) -> list[T]:
        """The items that are there, without waiting; empty when there are none."""
        ...


class NotYet:
    """What `Polled.poll` returns while there is no item."""


NOT_YET: Final = NotYet()


class Polled(Generic[T]):
    """An async iterator that can be asked for what is there. For one task; not to be shared."""

    def __init__(self, source: AsyncIterable[T]) -> None:
        self._source = source
        self._iterator: AsyncIterator[T] = aiter(source)
        self._step: Generator[Any, Any, T] | None = None
        """The `__anext__` that waits."""
        self._waits_for: Any = None
        streams: tuple[object, ...] = (source, self._iterator)
        self._read_ready = next((stream.read_ready for stream in streams if isinstance(stream, ReadsReady)), None)

    def poll(self) -> T | NotYet:
        """The next item when it is there already, else NOT_YET; then `wait` comes next.

        Raises StopAsyncIteration at the end, and whatever the iterator raises.
        """
        step = _steps(anext(self._iterator))
        try:
            self._waits_for = step.send(None)
        except StopIteration as done:
            return cast("T", done.value)
        self._step = step
        return NOT_YET

    def ready(self) -> list[T]:
        """More items that are there, where the source tells that in one go; else none."""
        return self._read_ready() if self._read_ready is not None else []

    @types.coroutine
    def wait(self, error: BaseException | None = None) -> Generator[Any, Any, T]:
        """Wait for the item that was not there; with `error`, have that raised where the iterator waits."""
        step, found = self._step, self._waits_for
        if step is None:
            raise RuntimeError("wait() without a poll() that found nothing")
        self._waits_for = None
        try:
            if error is not None:
                found = step.throw(error)
            while True:
                try:
                    sent = yield found
                except BaseException as raised:  # a cancellation belongs to what waits within the iterator
                    found = step.throw(raised)
                else:
                    found = step.send(sent)
        except StopIteration as done:
            return cast("T", done.value)
        finally:
            self._step = None

    async def fail(self, error: BaseException) -> NoReturn:
        """What was done between `poll` and `wait` has failed: have the iterator see it, and raise it."""
        if self._step is not None:
            await self.wait(error)
        raise error

    async def close(self) -> None:
        """End the source: a call behind it is cancelled, a generator is closed. After its end this does nothing."""
        cancel, aclose = getattr(self._source, "cancel", None), getattr(self._iterator, "aclose", None)
        if cancel is not None:
            cancel()
        if aclose is not None:
            await aclose()


def _steps(awaitable: Any) -> Generator[Any, Any, Any]:
    """What an `await` would step through."""
    return cast("Generator[Any, Any, Any]", awaitable.__await__() if hasattr(awaitable, "__await__") else awaitable)
