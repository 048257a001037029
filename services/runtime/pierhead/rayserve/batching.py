"""`@serve.batch`: `pierhead.batch` with Ray Serve's rules for arguments, sizes and limits that change.

The first call of a batch waits until the batch is full or `batch_wait_timeout_s` is over, on an idle replica, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, signature
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from pierhead.batching.results import ENDED, Batcher, StreamBatcher
from pierhead.batching.window import BatchLimits
from pierhead.rayserve.context import (
    _get_serve_request_context,
    _RequestContext,
    current_replica,
    enter_batch,
)
from pierhead.rayserve.exceptions import RayError, RayServeException

_ENDED: Final = (StopIteration, StopAsyncIteration)
"""What a generator yields for a caller without further results."""

_NO_BOUND: Final = 2**31


class _Item(NamedTuple):
    """One call's arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    request: _RequestContext


class _Batched:
    """The batches of one decorated function: of each object, replica and event loop its own."""

    def __init__(
        self, function: Callable[..., Any], limits: BatchLimits, size_fn: Callable[[list[Any]], Any] | None
    ) -> None:
        self._function = function
        self._signature = signature(function)
        self._size_fn = size_fn
        self._limits = limits
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[int, str], Any]] = WeakKeyDictionary()

    @property
    def size(self) -> int:
        """max_batch_size"""
        rows = self._limits.max_batch_rows
        return self._limits.max_batch_size if rows is None else rows

    @property
    def wait_s(self) -> float:
        """batch_wait_timeout_s"""
        return self._limits.batch_wait_timeout_s

    def change(self, **limits: Any) -> None:
        """Set limits of all batches that are to come."""
        if self._size_fn is not None and "max_batch_size" in limits:
            limits["max_batch_rows"] = limits.pop("max_batch_size")
        self._limits = replace(self._limits, **limits)
        for of_loop in self._of.values():
            for batcher in of_loop.values():
                batcher.limits = self._limits

    def joined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Item]:
        """The batcher of a call, and its item. Raises RuntimeError for one that is larger than a batch."""
        owner = _owner_of(args, self._function)
        bound = self._signature.bind(*args, **kwargs)
        item = _Item(tuple(bound.args[owner is not None :]), dict(bound.kwargs), _get_serve_request_context())
        if self._size_fn is not None and self._size([item]) > self.size:
            raise RuntimeError(
                "Size of item is greater than max_batch_size. Please increase the max_batch_size or check the "
                "implementation of the batch_size_fn."
            )
        of_loop = self._of.setdefault(asyncio.get_running_loop(), {})
        replica = current_replica()
        key = (id(owner), "" if replica is None else replica.replica_tag)
        if key not in of_loop:  # it refers to its owner, whose id is therefore not given to another object
            of_loop[key] = self._made(owner)
        return of_loop[key], item

    def _made(self, owner: Any) -> Any:
        function, own = self._function, () if owner is None else (owner,)

        async def computed(items: list[_Item]) -> Any:
            enter_batch(each.request for each in items)
            with _exits():
                args, kwargs = _columns(items)
                return _checked(await function(*own, *args, **kwargs), len(items))

        async def yielded(items: list[_Item]) -> AsyncIterator[Any]:
            enter_batch(each.request for each in items)
            with _exits():
                args, kwargs = _columns(items)
                async with aclosing(function(*own, *args, **kwargs)) as running:
                    async for results in running:
                        checked = _checked(results, len(items))
                        yield [ENDED if any(each is word for word in _ENDED) else each for each in checked]

        kind, compute = (StreamBatcher, yielded) if isasyncgenfunction(function) else (Batcher, computed)
        made: Any = kind
        return made(
            compute,
            self._limits,
            rows_of_all=None if self._size_fn is None else self._size_of_all,
            model_of=lambda item: item.request.multiplexed_model_id,
            name=function.__qualname__,
        )

    def _size(self, items: list[_Item]) -> float:
        """Raises what batch_size_fn raises."""
        assert self._size_fn is not None  # noqa: S101 - else nobody asks
        try:
            return float(self._size_fn([next(iter((*each.args, *each.kwargs.values()))) for each in items]))
        except StopIteration as error:  # no coroutine can raise it
            raise RuntimeError(f"batch_size_fn raised {error!r}") from error

    def _size_of_all(self, items: list[_Item]) -> float:
        """Items whose size together cannot be told do not fit together."""
        try:
            return self._size(items)
        except Exception:
            return float("inf")


@contextmanager
def _exits() -> Iterator[None]:
    """Where replicas share a process, code that exits fails its calls alone."""
    try:
        yield
    except SystemExit as error:
        replica = current_replica()
        if replica is None or not replica._shares_process:
            raise
        raise RayError(f"user code raised {error!r}") from error


def _columns(items: list[_Item]) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    if len({len(each.args) + len(each.kwargs) for each in items}) > 1:
        raise AssertionError("All batch requests should have the same number of parameters.")
    columns = [list(values) for values in zip(*(each.args for each in items), strict=True)]
    return columns, {name: [each.kwargs[name] for each in items] for name in items[0].kwargs}


def _checked(results: Any, count: int) -> Any:
    if len(results) != count:
        raise RayServeException(
            f"Batched function doesn't preserve batch size. The input list has length {count} but the returned "
            f"list has length {len(results)}."
        )
    return results


def _owner_of(args: tuple[Any, ...], function: Callable[..., Any]) -> Any:
    """The object whose method was called, None for a plain function."""
    method = getattr(args[0], function.__name__, None) if args else None
    return args[0] if method is not None and getattr(method, "__wrapped__", None) == function else None


def batch(
    _func: Callable[..., Any] | None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], int] | None = None,
) -> Any:
    """Compute calls together: the function takes lists and returns a list, or yields lists; callers pass one item.

    Raises TypeError and ValueError for limits and functions that cannot work. `set_max_batch_size` and
    `set_batch_wait_timeout_s` of the decorated function change the limits.
    """
    if _func is not None and not callable(_func):
        raise TypeError("@serve.batch can only be used to decorate functions or methods.")
    _check_limits(max_batch_size, batch_wait_timeout_s, max_concurrent_batches, batch_size_fn)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        streams = isasyncgenfunction(function)
        if not streams and not iscoroutinefunction(function):
            raise TypeError("Functions decorated with @serve.batch must be 'async def'")
        size = int(max_batch_size)
        limits = BatchLimits(
            size if batch_size_fn is None else _NO_BOUND,
            batch_wait_timeout_s,
            max_concurrent_batches,
            None if batch_size_fn is None else size,
            max_buffered_results=_NO_BOUND,
            eager=False,
        )
        batched = _Batched(function, limits, batch_size_fn)
        wrapper: Any

        if streams:

            @wraps(function)
            def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                batcher, item = batched.joined(args, kwargs)
                items: AsyncIterator[Any] = batcher.begin(item)
                return items

            wrapper = stream
        else:

            @wraps(function)
            async def one(*args: Any, **kwargs: Any) -> Any:
                batcher, item = batched.joined(args, kwargs)
                return await batcher(item)

            wrapper = one
        wrapper.set_max_batch_size = lambda size: batched.change(max_batch_size=size)
        wrapper.set_batch_wait_timeout_s = lambda wait_s: batched.change(batch_wait_timeout_s=wait_s)
        wrapper._get_max_batch_size = lambda: batched.size
        wrapper._get_batch_wait_timeout_s = lambda: batched.wait_s
        made: Callable[..., Any] = wrapper
        return made

    return decorate if _func is None else decorate(_func)


def _check_limits(size: Any, wait_s: Any, concurrent: Any, size_fn: Any) -> None:
    if not isinstance(size, int) and not (isinstance(size, float) and size.is_integer()):
        raise TypeError(f"max_batch_size must be integer >= 1, got {size}")
    if size < 1:
        raise ValueError(f"max_batch_size must be an integer >= 1, got {size}")
    if not isinstance(wait_s, int | float):
        raise TypeError(f"batch_wait_timeout_s must be a float >= 0, got {wait_s}")
    if wait_s < 0:
        raise ValueError(f"batch_wait_timeout_s must be a float >= 0, got {wait_s}")
    if not isinstance(concurrent, int) or concurrent < 1:
        raise TypeError(f"max_concurrent_batches must be an integer >= 1, got {concurrent}")
    if size_fn is not None and not callable(size_fn):
        raise TypeError(f"batch_size_fn must be a callable or None, got {type(size_fn)}")
