"""The context and the stream of requests of a servicer's method on the user's loop; the call is on the server's loop.

Methods that only read or set a value run at once; methods that wait for the caller run on the server's loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from pierhead.edge.methods import Context

T = TypeVar("T")

_END: Any = object()


Back = Callable[..., Coroutine[Any, Any, Any]]
"""`await back(function, *args)`: what a coroutine function returns or raises on the server's loop."""


async def user_requests(requests: AsyncIterable[T], back: Back) -> AsyncIterator[T]:
    """A stream of requests. Each message is fetched on demand: none is queued between the loops."""
    iterator = aiter(requests)

    async def following() -> T:
        return await anext(iterator, _END)

    while (message := await back(following)) is not _END:
        yield message


class UserContext:
    """A call's context. Methods that only read or set a value are the call's own."""

    def __init__(self, context: Context, back: Back, post: Callable[..., None]) -> None:
        self._context = context
        self._back = back
        self._post = post

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._context, name)
        if name not in ("read", "write", "send_initial_metadata", "abort", "abort_with_status"):
            return found

        async def there(*args: Any, **kwargs: Any) -> Any:
            return await self._back(partial(found, **kwargs), *args)

        return there

    def borrow(self) -> None:
        """None: a client's connection is written to on the replica's own loop."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(context)` at the end, on the user's loop."""
        self._context.add_done_callback(lambda _: self._post(callback, self))  # type: ignore[arg-type]  # sync or async
