"""The decorator `@batch`, which runs requests that arrive together as one batch.

`window.py` decides which requests form a batch and when, `run.py` runs batches, and `results.py` delivers the results
to the callers.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, overload

from pierhead.batching.results import Batcher, Ended, StreamBatcher
from pierhead.batching.window import BatchLimits

T = TypeVar("T")
R = TypeVar("R")


def batch(
    *,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[Any], int] | None = None,
    max_batch_rows: int | None = None,
    batch_timeout_s: float | None = None,
    max_buffered_results: int = 64,
) -> _BatchDecorator:
    """Decorate `async def f(self, items: list[T]) -> list[R]`; callers then write `result = await self.f(item)`.

        class Ranker(RankerServicer):
            @batch(max_batch_size=100, max_batch_rows=4096, batch_wait_timeout_s=0.005, batch_size_fn=rows)
            async def score(self, requests: list[RankRequest]) -> list[RankReply]: ...

    Or an async generator that yields lists, one element per item each time, `ENDED` for an item without further
    results; callers then write `async for result in self.f(item)`:

            @batch(max_batch_size=8)
            async def generate(self, prompts: list[str]) -> AsyncIterator[list[Token | Ended]]: ...

    - max_batch_size: requests per batch, at most.
    - batch_wait_timeout_s: how long the oldest request waits for others, in seconds. On an idle replica none waits.
    - max_concurrent_batches: batches that run at a time.
    - batch_size_fn: the rows of one item (not of the list); every item counts as 1 without it.
    - max_batch_rows: rows per batch, at most. Both bounds hold. An item with more rows forms a batch alone.
    - batch_timeout_s: how long a batch may run, in seconds; then its callers get DeadlineExceeded and it is cancelled.
    - max_buffered_results, of a generator: results that may wait for one reader. Beyond that, the batch waits for the
      reader, for one second in all; then that reader gets ReaderTooSlow and the others continue.

    Requests for different models (`RequestContext.model_id`) are never in one batch. A request whose deadline has
    passed before its batch starts is not computed: DeadlineExceeded. What the function raises goes to every caller.
    Each instance has batches of its own.
    Raises ValueError and TypeError at import for limits or functions that cannot work.
    """
    limits = BatchLimits(
        max_batch_size,
        batch_wait_timeout_s,
        max_concurrent_batches,
        max_batch_rows,
        batch_timeout_s,
        max_buffered_results,
    )
    return _BatchDecorator(limits, batch_size_fn)


class _BatchDecorator:
    """Typed four times: list or generator, for a plain function and for a method."""

    def __init__(self, limits: BatchLimits, batch_size_fn: Callable[[Any], int] | None) -> None:
        self._limits = limits
        self._rows_of = batch_size_fn

    @overload
    def __call__(self, function: Callable[[list[T]], Awaitable[Sequence[R]]]) -> Batcher[T, R]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[T]], Awaitable[Sequence[R]]]) -> Batcher[T, R]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], AsyncIterator[Sequence[R | Ended]]]) -> StreamBatcher[T, R]: ...
    @overload
    def __call__(
        self, function: Callable[[Any, list[T]], AsyncIterator[Sequence[R | Ended]]]
    ) -> StreamBatcher[T, R]: ...

    def __call__(self, function: Callable[..., Any]) -> Batcher[Any, Any] | StreamBatcher[Any, Any]:
        """Wrap the function."""
        if inspect.isasyncgenfunction(function):
            return StreamBatcher(function, self._limits, self._rows_of)
        if inspect.iscoroutinefunction(function):
            return Batcher(function, self._limits, self._rows_of)
        raise TypeError(
            f"@batch: {function.__qualname__} must be `async def`: it takes a list and returns a list, or yields lists"
        )
