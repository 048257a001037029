"""The context and the stream of requests of a servicer's method on the user's loop; the call is on the server's loop.

Methods that only read or set a value run at once; methods that wait for the caller run on the server's loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import grpc

from pierhead.edge.methods import Context

T = TypeVar("T")

_END: Any = object()


class Back(Protocol):
    """The way to the server's loop."""

    async def __call__(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run `function(*args)` there."""
        ...


class UserRequests(Generic[T]):
    """A stream of requests. Each message is fetched on demand: none is queued between the loops."""

    def __init__(self, requests: AsyncIterable[T], back: Back) -> None:
        self._requests = requests
        self._back = back
        self._iterator: AsyncIterator[T] | None = None

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        message = await self._back(self._next)
        if message is _END:
            raise StopAsyncIteration
        return message

    async def _next(self) -> T:
        if self._iterator is None:
            self._iterator = aiter(self._requests)
        return await anext(self._iterator, _END)


class UserContext:
    """A call's context. Methods that only read or set a value are the call's own."""

    def __init__(self, context: Context, back: Back, post: Callable[..., None]) -> None:
        self._context = context
        self._back = back
        self._post = post

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """The next request message, or `grpc.aio.EOF`."""
        return await self._back(self._context.read)

    async def write(self, message: Any) -> None:
        """Send a reply message, when the caller takes it."""
        await self._back(self._context.write, message)

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Send metadata ahead of the first message; once."""
        await self._back(self._context.send_initial_metadata, initial_metadata)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with a status. Raises AbortError, which must not be caught."""
        await self._back(self._context.abort, code, details, trailing_metadata)
        raise AssertionError("a context's abort raises")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status object."""
        await self._back(self._context.abort_with_status, status)
        raise AssertionError("a context's abort raises")

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(context)` at the end, on the user's loop."""
        self._context.add_done_callback(lambda _: self._post(callback, self))  # type: ignore[arg-type]  # sync or async
