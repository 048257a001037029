"""Runs batches: arrivals go into a window, batches come out of it and run as tasks, results go to their callers.

    caller -> _join -> window ... _look: take -> _start -> task: _run -> _compute -> callers
                          ^                                   |
                          +------------- _ended --------------+

Every task is owned by the runner that started it, and `_ended` is called however a task ends, even if it never ran:
the place of a batch cannot leak. Everything belongs to one event loop, and nothing awaits between reading a state
and changing it. `results.py` delivers the results to the callers.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from math import inf
from typing import Any, Generic, Self, TypeVar, cast

from pierhead import metrics as runtime_metrics
from pierhead.batching.window import BatchLimits, BatchWindow, Member
from pierhead.errors import DeadlineExceeded
from pierhead.memory import process
from pierhead.memory.scope import SCOPE, join
from pierhead.raised import is_answerable
from pierhead.request import CURRENT, RequestContext
from pierhead.trace import RequestSpan

T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A", bound="Arrival")

logger = logging.getLogger("pierhead")


class Arrival(Member[Any], ABC):
    """A member of a batch, and the caller that waits for it."""

    __slots__ = ("batch", "context", "request", "settled")

    def __init__(self, item: Any, rows: int, now: float) -> None:
        request = CURRENT.get()
        if request is None:
            super().__init__(item, rows, now)
        else:
            super().__init__(item, rows, now, request.deadline, request.model_id)
        self.request = request
        self.context = contextvars.copy_context()
        self.batch: RunningBatch | None = None
        """None until its batch starts."""
        self.settled = False
        """It needs no more results: it was answered, or its caller left."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the caller's wait with `error`, unless it has ended already."""


class RunningBatch:
    """The batch that the running code computes, with its items' requests and callers; see `current_batch`."""

    def __init__(self, members: Sequence[Arrival]) -> None:
        self._members = members
        self._unsettled = len(members)
        self._task: asyncio.Task[None] | None = None
        self.span: RequestSpan | None = None

    @property
    def requests(self) -> list[RequestContext | None]:
        """The request of each item, in the order of the items."""
        return [member.request for member in self._members]

    def is_wanted(self, index: int) -> bool:
        """Whether the caller of an item still waits. Work for an item whose caller has left can be skipped."""
        return not self._members[index].settled

    @property
    def is_wanted_by_any(self) -> bool:
        """Whether any caller still waits; when the last one leaves, the batch is cancelled."""
        return self._unsettled > 0

    def _settle(self, member: Arrival) -> None:
        if not member.settled:
            member.settled = True
            self._unsettled -= 1

    def _fail(self, error: BaseException) -> bool:
        """Fail every member that still waits; returns whether there was one."""
        waiting = [member for member in self._members if not member.settled]
        for member in waiting:
            member.fail(error)
            self._settle(member)
        return bool(waiting)


_RUNNING: ContextVar[RunningBatch | None] = ContextVar("pierhead_batch", default=None)


def current_batch() -> RunningBatch | None:
    """The batch that the running code computes; None outside of a batched function."""
    return _RUNNING.get()


class BatchRunner(ABC, Generic[A]):
    """Shared by both kinds of batchers. As a class's attribute it creates a batcher for each instance."""

    def __init__(
        self,
        function: Callable[..., Any],
        limits: BatchLimits,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        rows_of_all: Callable[[list[Any]], float] | None = None,
        model_of: Callable[[Any], str | None] | None = None,
        name: str | None = None,
        metrics: runtime_metrics.RuntimeMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        functools.update_wrapper(cast("Any", self), function)
        self._function = function
        self._rows_of = batch_size_fn
        self._rows_of_all = (
            None if rows_of_all is None else lambda members: rows_of_all([each.item for each in members])
        )
        self._model_of = model_of
        self._name = name or function.__qualname__
        self._metrics = metrics or runtime_metrics.PROCESS
        self._clock = clock
        self._attribute = function.__name__
        self._window: BatchWindow[A] = BatchWindow(limits, self._rows_of_all)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """The batcher of one instance, created at its first use; the instance holds it from then on."""
        if instance is None:
            return self
        function = self._function.__get__(instance)
        made = type(self)(
            function, self.limits, self._rows_of, name=self._name, metrics=self._metrics, clock=self._clock
        )
        # Python finds the entry in the instance's dictionary before this descriptor.
        vars(instance)[self._attribute] = made
        return made

    @property
    def limits(self) -> BatchLimits:
        """The decorator's arguments. Others hold from the next batch on."""
        return self._window.limits

    @limits.setter
    def limits(self, limits: BatchLimits) -> None:
        self._window.limits = limits

    # ---- callers

    def _rows(self, item: Any) -> int:
        if self._rows_of is None:
            return 1
        try:
            found = self._rows_of(item)
        except BaseException as error:
            error.add_note(f"raised by batch_size_fn of {self._name}: it is given one item, not the list of them")
            raise
        try:
            rows = operator.index(found)
        except TypeError:
            rows = -1
        if rows < 0:
            raise ValueError(
                f"batch_size_fn of {self._name}: expected the rows of one item, an integer >= 0, found {found!r}"
            )
        return rows

    def _join(self, member: A) -> None:
        """Queue a member. Raises DeadlineExceeded when its deadline has passed already."""
        if member.deadline <= member.arrived_at:
            raise self._late()
        if self._model_of is not None:
            member.model = self._model_of(member.item)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bind(loop)
        self._window.add(member)
        if self._turn is None:
            # One look per turn of the loop: everything that arrives in this turn is in the window by then.
            self._turn = loop.call_soon(self._look if self.limits.eager else self._look_next)

    def _leave(self, member: A) -> None:
        """Its caller has left. The other members continue; a batch that all callers have left is cancelled."""
        batch = member.batch
        if batch is None:
            self._window.discard(member)
            if not len(self._window):
                self._cancel_timer()
        elif not member.settled:
            batch._settle(member)
            if not batch.is_wanted_by_any and batch._task is not None:
                batch._task.cancel()

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to the running loop from now on, unless another loop still has work here."""
        busy = self._loop is not None and not self._loop.is_closed() and (len(self._window) or self._tasks)
        if busy:
            raise RuntimeError(f"{self._name} works for another event loop: a batcher belongs to one loop at a time")
        self._window = BatchWindow(self.limits, self._rows_of_all)
        self._tasks = set()
        self._turn = self._timer = None
        self._loop = loop

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._name}: the request's deadline passed before its batch could start; nothing was computed for it"
        )

    # ---- batches

    def _look(self) -> None:
        """Start every batch that is due, and set the timer for the next one."""
        self._turn = None
        self._cancel_timer()
        while (due := self._window.due_at()) is not None:
            now = self._clock()
            if due > now:
                self._timer = asyncio.get_running_loop().call_later(due - now, self._look)
                return
            members, expired = self._window.start_batch(now)
            for member in expired:
                member.fail(self._late())
            if members:
                self._start(members)

    def _look_next(self) -> None:
        """Look in the next turn: callers that have been cancelled in this one have left by then."""
        self._turn = asyncio.get_running_loop().call_soon(self._look)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, members: list[A]) -> None:
        """Run a batch as a task, in its first member's context with the batch's own request."""
        started, limit = self._clock(), self.limits.batch_timeout_s
        batch, rows = RunningBatch(members), sum(member.rows for member in members)
        batch.span = _traced(f"batch {self._name}", members, rows, started)
        for member in members:
            member.batch = batch
        context = members[0].context
        context.run(_RUNNING.set, batch)
        if process.MEMORY is not None:
            context.run(SCOPE.set, join([member.context.get(SCOPE) for member in members]))
        context.run(CURRENT.set, _merged(members, inf if limit is None else started + limit))
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(batch, members), context=context, name=f"batch {self._name}")
        batch._task = task
        timer = None if limit is None else loop.call_later(limit, self._time_out, batch, limit)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, batch, timer))
        label = (self._name,)
        self._metrics.batch_size.observe(label, len(members))
        self._metrics.batch_rows.observe(label, rows)
        self._metrics.batch_wait.observe(label, started - members[0].arrived_at)

    async def _run(self, batch: RunningBatch, members: list[A]) -> None:
        started, outcome = self._clock(), "cancelled"
        try:
            await self._compute(batch, members)
            outcome = "OK"
        except BaseException as error:
            if not is_answerable(error):
                raise
            outcome = "failed"
            if not batch._fail(error):
                logger.warning("%s failed after all of its callers had left", self._name, exc_info=error)
        finally:
            ended = self._clock()
            self._metrics.batch_duration.observe((self._name,), ended - started)
            if batch.span is not None:
                batch.span.end(ended, outcome)

    @abstractmethod
    async def _compute(self, batch: RunningBatch, members: list[A]) -> None:
        """Call the function and deliver its results. Its exception goes to every member that still waits."""

    def _time_out(self, batch: RunningBatch, limit: float) -> None:
        """Fail the members at once. The next batch starts when the cancelled function has ended."""
        batch._fail(
            DeadlineExceeded(f"{self._name}: the batch was not done within {limit:g} s (batch_timeout_s); cancelled")
        )
        if batch._task is not None:
            batch._task.cancel()

    def _ended(self, batch: RunningBatch, timer: asyncio.TimerHandle | None, task: asyncio.Task[None]) -> None:
        if timer is not None:
            timer.cancel()
        self._tasks.discard(task)
        self._window.finished()
        batch._fail(asyncio.CancelledError())  # only a cancelled batch has members that still wait
        self._look()

    def _check(self, results: object, expected: int, verb: str) -> None:
        if not isinstance(results, Sequence) or isinstance(results, str | bytes):
            raise TypeError(
                f"{self._name} must {verb} a list with one result per request, in their order; "
                f"it returned {type(results).__name__}"
            )
        if len(results) != expected:
            raise ValueError(
                f"{self._name} must {verb} one result per request, in their order; it received {expected} requests "
                f"and returned {len(results)} results"
            )


def _traced(name: str, members: Sequence[Arrival], rows: int, started: float) -> RequestSpan | None:
    """The span of a batch, which the traces of all its requests have; None where no request has one."""
    traces = dict.fromkeys(each.request.trace for each in members if each.request and each.request.trace)
    if not traces:
        return None
    span = RequestSpan("batch", name, started)
    span.members, span.attributes = list(traces), {"members": len(members), "rows": rows}
    for trace in traces:
        trace.add(span)
    return span


def _merged(members: Sequence[Arrival], latest: float) -> RequestContext | None:
    """The batch's own request: the first member's id, and time for as long as any member waits.

    The model is the same for all members. The batch has a session only if all members have the same one. Its calls are
    in the trace of the first member that is in the sample, else of the first one.
    """
    requests = [member.request for member in members if member.request is not None]
    if not requests:
        return None
    first = requests[0]
    sessions = {request.session_id for request in requests}
    traced = next((request for request in requests if request.trace and request.trace.sampled), first)
    return first._replace(
        trace=traced.trace,
        given_traceparent=traced.given_traceparent,
        deadline=min(latest, max(member.deadline for member in members)),
        session_id=first.session_id if len(sessions) == 1 else None,
    )
