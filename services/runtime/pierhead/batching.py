"""`@batch`: requests that arrive together are worked on together.

When a batch starts (`BatchWindow.take` is this list in code):

1. not while `max_concurrent_batches` run already;
2. at once when it is full: `max_batch_size` requests, or `max_batch_rows` rows;
3. at the end of the event loop's turn when its first request found nothing running and nothing waiting, with whatever
   came in that turn: an idle replica keeps nobody waiting;
4. when its oldest request has waited `batch_wait_timeout_s`.

While a batch runs, arrivals collect, so batches grow with the load by themselves.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast, overload

from pierhead import metrics as runtime_metrics
from pierhead.request import CURRENT, RequestContext

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What bounds a batch. Raises ValueError that names the limit when one makes no sense."""

    max_batch_size: int = 10
    batch_wait_timeout_s: float = 0.01
    max_concurrent_batches: int = 1
    max_batch_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_concurrent_batches", "max_batch_rows"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: expected an integer >= 1, found {value!r}")
        if not self.batch_wait_timeout_s >= 0:
            raise ValueError(f"batch_wait_timeout_s: expected seconds >= 0, found {self.batch_wait_timeout_s!r}")


@dataclass(slots=True, eq=False)
class Member(Generic[T]):
    """One request on its way through a batch."""

    item: T
    rows: int
    arrived_at: float


class BatchWindow(Generic[T]):
    """Decides which requests form the next batch, and when. No I/O, no clock: `now` is handed in, in seconds."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.running = 0
        self._waiting: deque[Member[T]] = deque()
        self._rows = 0
        self._eager = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, member: Member[T]) -> None:
        """A request arrived."""
        if not self._waiting and self.running == 0:
            self._eager = True
        self._waiting.append(member)
        self._rows += member.rows

    def discard(self, member: Member[T]) -> None:
        """A request that has not started left; the others keep their places."""
        if member in self._waiting:
            self._waiting.remove(member)
            self._rows -= member.rows
            self._eager = self._eager and bool(self._waiting)

    def due_at(self) -> float | None:
        """When `take` is worth calling if nothing else happens; None when nothing waits or no batch may start."""
        if not self._waiting or self.running >= self.limits.max_concurrent_batches:
            return None
        oldest = self._waiting[0].arrived_at
        return oldest if self._eager or self._full() else oldest + self.limits.batch_wait_timeout_s

    def take(self, now: float) -> list[Member[T]]:
        """Start the next batch if one is due: its members, in order of arrival; else an empty list.

        A request with more rows than `max_batch_rows` goes alone: splitting it is the service's affair.
        """
        due = self.due_at()
        if due is None or now < due:
            return []
        self._eager = False
        limits = self.limits
        members: list[Member[T]] = []
        rows = 0
        while self._waiting and len(members) < limits.max_batch_size:
            rows += self._waiting[0].rows
            if members and limits.max_batch_rows is not None and rows > limits.max_batch_rows:
                break
            members.append(self._waiting.popleft())
        self._rows -= sum(member.rows for member in members)
        self.running += 1
        return members

    def finished(self) -> None:
        """A batch that `take` gave out is over."""
        self.running -= 1

    def _full(self) -> bool:
        limits = self.limits
        return len(self._waiting) >= limits.max_batch_size or (
            limits.max_batch_rows is not None and self._rows >= limits.max_batch_rows
        )


class _Waiting(Member[T]):
    """A member with the caller that waits for it."""

    __slots__ = ("context", "future")

    def __init__(self, item: T, rows: int, arrived_at: float, future: asyncio.Future[Any]) -> None:
        super().__init__(item, rows, arrived_at)
        self.future = future
        self.context = CURRENT.get()


class Batcher(Generic[T, R]):
    """Runs one function over batches; calling it with one item waits for that item's result.

    What `@batch` puts in the place of the method. Belongs to one event loop.
    """

    def __init__(
        self,
        function: Callable[[list[T]], Awaitable[Sequence[R]]],
        limits: BatchLimits,
        batch_size_fn: Callable[[T], int] | None = None,
        *,
        name: str = "batch",
        metrics: runtime_metrics.RuntimeMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._function = function
        self._rows_of = batch_size_fn
        self._name = name
        self._metrics = metrics or runtime_metrics.PROCESS
        self._clock = clock
        self._window: BatchWindow[T] = BatchWindow(limits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def limits(self) -> BatchLimits:
        """The limits in force."""
        return self._window.limits

    def set_max_batch_size(self, value: int) -> None:
        """Change the bound on requests; the next batch obeys. Raises ValueError."""
        self._set(max_batch_size=value)

    def set_max_batch_rows(self, value: int | None) -> None:
        """Change the bound on rows; None = no bound. Raises ValueError."""
        self._set(max_batch_rows=value)

    def set_batch_wait_timeout_s(self, value: float) -> None:
        """Change how long the oldest request may wait for company, in seconds. Raises ValueError."""
        self._set(batch_wait_timeout_s=value)

    def set_max_concurrent_batches(self, value: int) -> None:
        """Change how many batches may run at a time. Raises ValueError."""
        self._set(max_concurrent_batches=value)

    async def __call__(self, item: T) -> R:
        """Wait for `item`'s result. Cancelling takes the item out and harms no other; errors go to every member."""
        rows = 1 if self._rows_of is None else self._rows_of(item)
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        member = _Waiting(item, rows, self._clock(), future)
        self._window.add(member)
        if self._turn is None:
            # One look per turn of the loop: everything that arrives in this turn is in the window by then.
            self._turn = asyncio.get_running_loop().call_soon(self._look)
        try:
            return await future
        except asyncio.CancelledError:
            self._window.discard(member)
            raise

    def _set(self, **changes: Any) -> None:
        self._window.limits = replace(self._window.limits, **changes)
        if len(self._window):
            self._look()

    def _look(self) -> None:
        """Start every batch that is due, and set the timer for the next one."""
        self._turn = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while members := self._window.take(self._clock()):
            self._start(cast("list[_Waiting[T]]", members))
        due = self._window.due_at()
        if due is not None:
            delay = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _start(self, members: list[_Waiting[T]]) -> None:
        context = contextvars.copy_context()
        context.run(CURRENT.set, _merged(members))
        task = asyncio.get_running_loop().create_task(self._run(members), context=context, name=f"batch {self._name}")
        # The batcher owns its tasks: it holds them until they end, and every outcome goes to the members' futures.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        abandon = functools.partial(_cancel_if_abandoned, members, task)
        for member in members:
            member.future.add_done_callback(abandon)

    async def _run(self, members: list[_Waiting[T]]) -> None:
        started = self._clock()
        label = (self._name,)
        self._metrics.batch_size.observe(label, len(members))
        self._metrics.batch_rows.observe(label, sum(member.rows for member in members))
        self._metrics.batch_wait.observe(label, started - members[0].arrived_at)
        try:
            results = await self._function([member.item for member in members])
            self._check(results, len(members))
        except asyncio.CancelledError:
            for member in members:
                member.future.cancel()
            raise
        except Exception as error:
            for member in members:
                if not member.future.done():
                    member.future.set_exception(error)
        else:
            for member, result in zip(members, results, strict=True):
                if not member.future.done():
                    member.future.set_result(result)
        finally:
            self._metrics.batch_duration.observe(label, self._clock() - started)
            self._window.finished()
            self._look()

    def _check(self, results: Sequence[R], expected: int) -> None:
        if not isinstance(results, Sequence) or isinstance(results, str | bytes):
            raise TypeError(
                f"{self._name} must return a list with one result per request, in their order; "
                f"it returned {type(results).__name__}"
            )
        if len(results) != expected:
            raise ValueError(
                f"{self._name} must return one result per request, in their order; it was given {expected} requests "
                f"and returned {len(results)} results"
            )


class BatchMethod(Generic[T, R]):
    """What a decorated function becomes: on an instance it gives that instance's own Batcher; also callable itself."""

    def __init__(
        self,
        function: Callable[..., Awaitable[Sequence[R]]],
        limits: BatchLimits,
        batch_size_fn: Callable[[T], int] | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._limits = limits
        self._rows_of = batch_size_fn
        self._name = function.__name__
        self._free: Batcher[T, R] | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Batcher[T, R]:
        """The Batcher of one instance, made at its first use; the instance holds it from then on."""
        if instance is None:
            return cast("Batcher[T, R]", self)
        made = self._make(self._function.__get__(instance))
        # In the instance's dictionary it is found before this descriptor is.
        vars(instance)[self._name] = made
        return made

    async def __call__(self, item: T) -> R:
        """Call a decorated function that is not a method."""
        if self._free is None:
            self._free = self._make(self._function)
        return await self._free(item)

    def _make(self, function: Callable[[list[T]], Awaitable[Sequence[R]]]) -> Batcher[T, R]:
        return Batcher(function, self._limits, self._rows_of, name=self._function.__qualname__)


def batch(
    *,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[Any], int] | None = None,
    max_batch_rows: int | None = None,
) -> _Decorator:
    """Decorate `async def f(self, items: list[T]) -> list[R]`; callers then write `result = await self.f(item)`.

        class Ranker(RankerServicer):
            @batch(max_batch_size=100, max_batch_rows=4096, batch_wait_timeout_s=0.005, batch_size_fn=rows)
            async def score(self, requests: list[RankRequest]) -> list[RankReply]: ...

    - max_batch_size: requests per batch, at most.
    - batch_wait_timeout_s: how long the oldest request waits for company, in seconds. An idle replica waits for none.
    - max_concurrent_batches: batches that run at a time.
    - batch_size_fn: the rows of one item (not of the list); every item counts as 1 without it.
    - max_batch_rows: rows per batch, at most. Both bounds hold. An item with more rows than that goes alone.

    Each instance batches for itself. Limits change at run time: `self.score.set_max_batch_size(50)`.
    Raises ValueError and TypeError at import for limits or functions that cannot work.
    """
    limits = BatchLimits(max_batch_size, batch_wait_timeout_s, max_concurrent_batches, max_batch_rows)
    return _Decorator(limits, batch_size_fn)


class _Decorator:
    """Typed twice: for a method and for a plain function."""

    def __init__(self, limits: BatchLimits, batch_size_fn: Callable[[Any], int] | None) -> None:
        self._limits = limits
        self._rows_of = batch_size_fn

    @overload
    def __call__(self, function: Callable[[list[T]], Awaitable[Sequence[R]]]) -> BatchMethod[T, R]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[T]], Awaitable[Sequence[R]]]) -> BatchMethod[T, R]: ...

    def __call__(self, function: Callable[..., Awaitable[Sequence[Any]]]) -> BatchMethod[Any, Any]:
        """Wrap the function."""
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"@batch: {function.__qualname__} must be `async def`: it takes a list and returns a list")
        return BatchMethod(function, self._limits, self._rows_of)


def _merged(members: Sequence[_Waiting[T]]) -> RequestContext | None:
    """The batch's own request context: the first member's id, and time as long as any member waits."""
    contexts = [member.context for member in members if member.context is not None]
    if not contexts:
        return None
    return contexts[0]._replace(deadline=max(context.deadline for context in contexts))


def _cancel_if_abandoned(members: Sequence[_Waiting[T]], task: asyncio.Task[None], _: asyncio.Future[Any]) -> None:
    """Nobody waits any more: stop the work."""
    if not task.done() and all(member.future.cancelled() for member in members):
        task.cancel()
