"""`@serve.batch`: calls that arrive within a time are computed together, by Ray Serve's rules.

`pierhead.batch` differs: on an idle replica it waits for no second call. Here the first call of a batch waits until the
batch is full or `batch_wait_timeout_s` is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from functools import wraps
from inspect import Signature, isasyncgenfunction, iscoroutinefunction, signature
from typing import Any, Final
from weakref import WeakKeyDictionary

from pierhead.raised import holdable
from pierhead.rayserve.context import (
    _get_serve_request_context,
    _RequestContext,
    batch_of,
    current_replica,
    enter_replica,
)
from pierhead.rayserve.exceptions import RayServeException

logger = logging.getLogger("ray.serve")

_ENDED: Final = (StopIteration, StopAsyncIteration)
"""What a generator yields for a caller without further results."""


class _Waiting:
    """One call: its arguments, and where its results go."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.request: _RequestContext = _get_serve_request_context()
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def give(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(holdable(error))


class _BatchedStream(_Waiting):
    """One call of a batched generator."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(args, kwargs)
        self.results: asyncio.Queue[Any] = asyncio.Queue()
        self.over = False

    def give(self, result: Any) -> None:
        if not self.over:
            self.results.put_nowait((result, None))

    def fail(self, error: BaseException) -> None:
        if not self.over:
            self.over = True
            self.results.put_nowait((None, error))
            if not self.future.done():
                self.future.set_result(None)

    def end(self) -> None:
        self.fail(StopAsyncIteration())

    async def items(self) -> AsyncIterator[Any]:
        try:
            while True:
                result, error = await self.results.get()
                if isinstance(error, StopAsyncIteration):
                    return
                if error is not None:
                    raise error
                yield result
        finally:
            self.over = True
            self.future.cancel()


class _Settings:
    """What may change while a replica runs."""

    def __init__(self, max_batch_size: int, batch_wait_timeout_s: float) -> None:
        self.max_batch_size = max_batch_size
        self.batch_wait_timeout_s = batch_wait_timeout_s


class _Batches:
    """The batches of one function, for one object and one event loop."""

    def __init__(
        self,
        function: Callable[..., Any],
        owner: Any,
        settings: _Settings,
        max_concurrent_batches: int,
        batch_size_fn: Callable[[list[Any]], int] | None,
    ) -> None:
        self._function = function
        self._owner = owner
        self._settings = settings
        self._size_fn = batch_size_fn
        self._places = asyncio.Semaphore(max_concurrent_batches)
        self._line: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        # In a context without a request: batches belong to many.
        context = Context()
        replica = current_replica()
        if replica is not None:
            context.run(enter_replica, replica, _RequestContext())
        self._forming = asyncio.get_running_loop().create_task(self._form(), context=context, name="batches")

    def join(self, waiting: _Waiting) -> None:
        self._line.append(waiting)
        self._arrived.set()

    async def _form(self) -> None:
        while True:
            batch = await self._next()
            if batch:
                task = asyncio.create_task(self._run_all(batch), name="batch")
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _next(self) -> list[_Waiting]:
        """The next batch: full, or as full as it is when the time is over. Empty where its first call is too large."""
        while not self._line:
            self._arrived.clear()
            await self._arrived.wait()
        most, wait_s = self._settings.max_batch_size, self._settings.batch_wait_timeout_s
        batch = [self._line.popleft()]
        if self._size_fn is not None and self._size(batch) > most:
            batch[0].fail(
                RuntimeError(
                    "Size of item is greater than max_batch_size. Please increase the max_batch_size or check the "
                    "implementation of the batch_size_fn."
                )
            )
            return []
        if not batch:
            return []
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while True:
            if not self._line:
                self._arrived.clear()
                try:
                    async with asyncio.timeout_at(until):
                        await self._arrived.wait()
                except TimeoutError:
                    pass
            if self._take(batch, most) or loop.time() >= until or self._size(batch) >= most:
                return batch

    def _take(self, batch: list[_Waiting], most: int) -> bool:
        """Move calls from the line into the batch; returns whether the next one did not fit."""
        while self._line and (self._size_fn is not None or len(batch) < most):
            batch.append(self._line.popleft())
            if self._size_fn is not None and self._size(batch) > most:
                self._line.append(batch.pop())
                return True
        return False

    def _size(self, batch: list[_Waiting]) -> float:
        """Where batch_size_fn raises, the last call fails with it, and leaves the batch."""
        while self._size_fn is not None and batch:
            try:
                return float(self._size_fn([next(iter((*each.args, *each.kwargs.values()))) for each in batch]))
            except StopIteration as error:  # no future can hold it
                batch.pop().fail(RuntimeError(f"batch_size_fn raised {error!r}"))
            except BaseException as error:
                batch.pop().fail(error)
        return len(batch)

    async def _run_all(self, batch: list[_Waiting]) -> None:
        """Run a batch, divided by the models that its calls are for."""
        by_model: dict[str, list[_Waiting]] = {}
        for each in batch:
            by_model.setdefault(each.request.multiplexed_model_id, []).append(each)
        async with self._places:
            tasks = [asyncio.create_task(self._run(part)) for part in by_model.values()]
            await asyncio.gather(*tasks)

    async def _run(self, batch: list[_Waiting]) -> None:
        batch = [each for each in batch if not each.future.cancelled()]
        if not batch:
            return
        try:
            with batch_of(tuple(each.request for each in batch)):
                await self._compute(batch)
        except BaseException as error:  # of user code, exits too
            for each in batch:
                each.fail(error)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise

    async def _compute(self, batch: list[_Waiting]) -> None:
        if len({len(each.args) + len(each.kwargs) for each in batch}) > 1:
            raise AssertionError("All batch requests should have the same number of parameters.")
        columns = [list(values) for values in zip(*(each.args for each in batch), strict=True)]
        named = {name: [each.kwargs[name] for each in batch] for name in batch[0].kwargs}
        owner = () if self._owner is None else (self._owner,)
        running = self._function(*owner, *columns, **named)
        if not isasyncgenfunction(self._function):
            results = await running
            self._check(results, len(batch))
            for each, result in zip(batch, results, strict=True):
                each.give(result)
            return
        ended: set[int] = set()
        async for results in running:
            self._check(results, len(batch))
            for number, result in enumerate(results):
                each = batch[number]
                if number in ended:
                    continue
                if any(result is word for word in _ENDED):
                    ended.add(number)
                    each.end()  # type: ignore[attr-defined]
                else:
                    each.give(result)
        for each in batch:
            each.end()  # type: ignore[attr-defined]

    @staticmethod
    def _check(results: Any, count: int) -> None:
        if len(results) != count:
            raise RayServeException(
                f"Batched function doesn't preserve batch size. The input list has length {count} but the returned "
                f"list has length {len(results)}."
            )


class _Batched:
    """The batches of one decorated function: of each object, replica and event loop its own."""

    def __init__(
        self,
        function: Callable[..., Any],
        settings: _Settings,
        max_concurrent_batches: int,
        batch_size_fn: Callable[[list[Any]], int] | None,
    ) -> None:
        self.settings = settings
        self._function = function
        self._signature: Signature = signature(function)
        self._concurrent = max_concurrent_batches
        self._size_fn = batch_size_fn
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[int, str], _Batches]] = WeakKeyDictionary()

    def join(self, kind: type[_Waiting], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put one call into the line."""
        owner = _owner_of(args, self._function)
        bound = self._signature.bind(*args, **kwargs)
        given = bound.args[1:] if owner is not None else bound.args
        waiting = kind(tuple(given), dict(bound.kwargs))
        self._batches(owner).join(waiting)
        return waiting

    def _batches(self, owner: Any) -> _Batches:
        of_loop = self._of.setdefault(asyncio.get_running_loop(), {})
        replica = current_replica()
        key = (id(owner), "" if replica is None else replica.replica_tag)
        found = of_loop.get(key)
        if found is None:
            # It refers to its owner, whose id is therefore not given to another object.
            found = of_loop[key] = _Batches(self._function, owner, self.settings, self._concurrent, self._size_fn)
        return found


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
        settings = _Settings(int(max_batch_size), batch_wait_timeout_s)
        batched = _Batched(function, settings, max_concurrent_batches, batch_size_fn)
        wrapper: Any

        if streams:

            @wraps(function)
            def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                joined: _BatchedStream = batched.join(_BatchedStream, args, kwargs)
                return joined.items()

            wrapper = stream
        else:

            @wraps(function)
            async def one(*args: Any, **kwargs: Any) -> Any:
                return await batched.join(_Waiting, args, kwargs).future

            wrapper = one

        def set_max_batch_size(new_max_batch_size: int) -> None:
            settings.max_batch_size = new_max_batch_size

        def set_batch_wait_timeout_s(new_batch_wait_timeout_s: float) -> None:
            settings.batch_wait_timeout_s = new_batch_wait_timeout_s

        wrapper.set_max_batch_size = set_max_batch_size
        wrapper.set_batch_wait_timeout_s = set_batch_wait_timeout_s
        wrapper._get_max_batch_size = lambda: settings.max_batch_size
        wrapper._get_batch_wait_timeout_s = lambda: settings.batch_wait_timeout_s
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
