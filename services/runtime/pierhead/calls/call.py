"""One call through a handle: how it gets to a replica, to another one, and to its end. `calls` has the four kinds.

    take a replica with room ---------> open the call there ----> reply
       | none                              | refused, or never sent
       v                                   v
    wait in the queue (bounded, deadline)    another replica (within the retry budget), else in the queue
       | deadline, queue full
       v
    Backpressure, NoReplica

Where the policy is asynchronous, a task asks it first, and the call then does all this with the policy's ranks.

A call that a replica may have begun is never sent a second time. Nor is a call that has sent a part of its stream of
requests.

When a replica has room, which is nearly always, a call costs no task and no timer of ours: the transport's call is
opened at once, and awaiting ours awaits it. A call that has to wait costs a place in the queue and a deadline, no task.

A call that is no longer referenced is cancelled: its result is lost, and it would take up a place at a replica. So
nothing that outlives a call (leases, transports) refers to it, except the queue while it waits there, and the task that
asks an asynchronous policy.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from pierhead.calls.failures import Blame, CallFailure, count
from pierhead.calls.queue import QueuePlace
from pierhead.deadlines import LONGEST_S
from pierhead.errors import DeadlineExceeded, PierheadError
from pierhead.held import parse_announcement
from pierhead.lanes.connection import Method, MethodKind
from pierhead.policies.router import Ranks, Unranked
from pierhead.request import (
    CURRENT,
    MODEL_KEY,
    REQUEST_ID_KEY,
    SESSION_KEY,
    TRACEPARENT_KEY,
    RequestContext,
    new_request_id,
)
from pierhead.routing_stats import parse_stats
from pierhead.trailers import Trailers

if TYPE_CHECKING:
    from pierhead.calls.binding import Binding
    from pierhead.calls.lease import CallPlace
    from pierhead.calls.replica import Replica
    from pierhead.deadlines import Deadline
    from pierhead.trace import RequestSpan

BACKOFF_S = (0.01, 0.5)
"""Shortest and longest pause of a call for which the retry budget has nothing left."""


class Call:
    """What calls of every kind share: choosing a replica, trying another one, reporting the outcome."""

    # Class attributes: most calls never set them.
    session_id: str | None = None
    model_id: str | None = None
    ranks: Ranks[Replica] | None = None
    """What an asynchronous policy has returned; None = it has not been asked."""
    _call: Any = None
    """The transport's call; None while there is none."""
    _lease: CallPlace
    """On the replica that has the call, or had it last."""
    _opening: asyncio.Future[None] | None = None
    """Done when the call is at a replica, or never will be; None when it reached one at once."""
    _place: QueuePlace | None = None
    _timer: Deadline | None = None
    _ranking: asyncio.Task[None] | None = None
    _context: contextvars.Context | None = None
    """The caller's, where the call waits before the policy is asked."""
    _tried: list[Replica] | None = None
    _pauses = 0
    _patient = False
    """Whether the replica may queue it instead of refusing it."""
    _ended = False
    _callbacks: list[Callable[[Any], None]] | None = None
    _span: RequestSpan | None = None
    """In the trace of the request that makes the call."""
    _raised: Sequence[Exception] = ()
    """The error of the iterator of requests, if it raised one."""

    def __init__(
        self, binding: Binding, method: Method, request: Any, timeout: float | None, metadata: Any, compression: Any
    ) -> None:
        self._binding = binding
        self._pool = pool = binding.pool
        self._method = method
        self._request = request
        self._compression = compression
        self._started = now = time.monotonic()
        limit = binding.timeout_s if timeout is None else min(timeout, LONGEST_S)
        context = CURRENT.get()
        if context is None:
            self._metadata: tuple[tuple[str, str], ...] = ((REQUEST_ID_KEY, new_request_id()),)
        else:
            limit = min(limit, context.deadline - now)
            self._metadata = self._inherited(context, now)
        if metadata:
            self._add_metadata(metadata)
        self._limit = limit
        self._deadline = now + limit
        if limit <= 0:
            self._deny(DeadlineExceeded(f"{method.path[1:]}: not sent, its deadline has passed already"))
            return
        pool.budget.called()
        try:
            lease = pool.take(binding.router, self, now)
        except (PierheadError, Unranked) as error:  # of the policy
            self._untaken(error)
            return
        if lease is not None:
            self._open(lease, limit)
        else:
            self._wait()

    def __del__(self) -> None:
        # Not when another thread collects garbage, nor when the loop is closed.
        if not self._ended and self._call is not None and self._binding.is_current():
            self.cancel()
            if self._span is not None:
                self._span.end(time.monotonic(), "not read")

    # ---- as policies.RoutedCall

    @property
    def path(self) -> str:
        """/package.Service/Method"""
        return self._method.path

    @property
    def request(self) -> Any:
        """The request message."""
        return self._request

    # ---- as grpc.aio.Call

    def cancel(self) -> bool:
        """Cancel the call, wherever it is: in the queue, or at the replica."""
        if self._call is not None:
            cancelled = bool(self._call.cancel())
        else:
            self._stop_waiting()
            cancelled = self._opening is not None and self._opening.cancel()
        if cancelled:
            self._end("cancelled")
        return cancelled

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        if self._call is not None:
            return bool(self._call.cancelled())
        return self._opening is not None and self._opening.cancelled()

    def done(self) -> bool:
        """Whether it has ended."""
        if self._call is not None:
            return bool(self._call.done())
        return self._opening is not None and self._opening.done()

    def time_remaining(self) -> float | None:
        """Seconds until its deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(call)` once the call has ended for its caller, who has then awaited the reply."""
        if self._ended:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    async def initial_metadata(self) -> Any:
        """What the replica sent first."""
        return await (await self._opened()).initial_metadata()

    async def trailing_metadata(self) -> Any:
        """What the replica sent last."""
        return await (await self._opened()).trailing_metadata()

    async def code(self) -> grpc.StatusCode:
        """The status it ended with."""
        try:
            return await (await self._opened()).code()  # type: ignore[no-any-return]
        except PierheadError as error:
            return error.code()

    async def details(self) -> str:
        """The message that came with the status."""
        try:
            return await (await self._opened()).details()  # type: ignore[no-any-return]
        except PierheadError as error:
            return error.details()

    async def wait_for_connection(self) -> None:
        """Return once the call is on its way to a replica. Raises as awaiting it would."""
        await (await self._opened()).wait_for_connection()

    # ---- getting to a replica

    def _inherited(self, context: RequestContext, now: float) -> tuple[tuple[str, str], ...]:
        """The metadata that a call has from the request that makes it."""
        request_id, _, traceparent, self.session_id, self.model_id, trace = context
        ours: tuple[tuple[str, str], ...] = ((REQUEST_ID_KEY, request_id),)
        if trace is not None and trace.has_ended:
            traceparent = None  # work that outlives its request
        elif trace is not None:
            self._span = span = trace.span("client", self._method.path[1:], now)
            traceparent = trace.traceparent(span.span_id)
        if traceparent is not None:
            ours += ((TRACEPARENT_KEY, traceparent),)
        if self.session_id is not None:
            ours += ((SESSION_KEY, self.session_id),)
        if self.model_id is not None:
            ours += ((MODEL_KEY, self.model_id),)
        return ours

    def _add_metadata(self, metadata: Any) -> None:
        """Add the caller's own pairs, which may name another session and model for this one call."""
        self._metadata += tuple(metadata)
        for key, value in metadata:
            if key == SESSION_KEY:
                self.session_id = value
            elif key == MODEL_KEY:
                self.model_id = value

    def _open(self, lease: CallPlace, timeout: float, *, patient: bool = False) -> None:
        """Open the call at the replica, or fail it with what the transport raises."""
        self._patient = patient
        try:
            call = lease.replica.connection.open(
                self._method, self._request, timeout, self._metadata, self._compression, patient=patient
            )
        except BaseException as error:
            lease.end()
            if not isinstance(error, Exception):
                raise
            self._deny(error)
            return
        # The transport calls this however the call ends: the count cannot leak.
        call.add_done_callback(lease.end)
        self._lease = lease
        self._call = call

    def _deny(self, error: Exception) -> None:
        """Fail the call before it reaches a replica; awaiting it raises `error`."""
        opening = self._opening
        if opening is None or opening.done():
            opening = self._opening = asyncio.get_running_loop().create_future()
        opening.set_exception(error)
        opening.exception()  # marks it as read, else the loop logs it if the caller never awaits the call
        # Callbacks run later: the pool first serves the other calls.
        self._end(error.kind if isinstance(error, PierheadError) else "error", call_back_soon=True)

    async def _opened(self) -> Any:
        """The transport's call, once it is open. Raises the call's error if it never opens."""
        while self._call is None:
            assert self._opening is not None  # noqa: S101 - else `__init__` has not ended
            try:
                await self._opening
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._call

    # ---- asking an asynchronous policy

    def _untaken(self, error: Exception, *, returned: bool = False) -> None:
        """The pool has raised `error` in place of a lease: ask the policy, or fail the call."""
        if isinstance(error, Unranked):
            self._rank(returned=returned)
        else:
            self._deny(error)

    def _rank(self, *, returned: bool = False) -> None:
        """Ask the policy, and then take a replica or stand in the queue; `returned`: as for `_wait`."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_future()
        self._timer = self._binding.deadlines.add(self._deadline, self._ranked_too_late)
        # The pool may do this in the context of another call.
        self._ranking = self._binding.loop.create_task(self._ask(returned), name="choose", context=self._context)

    async def _ask(self, returned: bool) -> None:
        router = self._binding.router
        try:
            if candidates := self._pool.candidates(router):
                self.ranks = await router.rank(candidates, self)
        except PierheadError as error:
            self._ranking = None
            self._denied(error)
        else:
            self._ranking = None
            self._ranked(returned)

    def _ranked(self, returned: bool) -> None:
        """Take a replica by the policy's ranks, or stand in the queue."""
        self._stop_waiting()
        now = time.monotonic()
        if now >= self._deadline:
            self._ranked_too_late()
            return
        try:
            lease = self._pool.take(self._binding.router, self, now)
        except PierheadError as error:  # of the policy
            self._denied(error)
            return
        if lease is not None:
            self._granted(lease, patient=False)
        elif self._opening is not None and not self._opening.done():  # else it was cancelled in this very turn
            self._wait(returned=returned)

    def _ranked_too_late(self) -> None:
        """The policy has not returned in time."""
        path = self._method.path[1:]
        self._denied(DeadlineExceeded(f"{path}: not sent, the policy has chosen no replica within {self._limit:.3g} s"))

    # ---- waiting

    def _wait(self, *, returned: bool = False) -> None:
        """Join the queue. `returned`: the call was at a replica, which refused it, or in the queue."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_future()
        now = time.monotonic()
        try:
            patience = self._binding.patience(self._deadline - now, returned=returned)
        except PierheadError as error:
            self._deny(error)
            return
        if self.ranks is None and self._binding.router.is_async:
            if self._pool.has_callable:
                self._rank(returned=returned)
                return
            self._context = contextvars.copy_context()
        self._place = place = QueuePlace(self._started, self, self._binding.router, self._granted, self._denied)
        if self._span is not None:
            self._span.event(now, "waits for a replica with room")
        self._timer = self._binding.deadlines.add(now + patience, self._gave_up)
        self._binding.joined(1)
        self._pool.join(place)

    def _pause_over(self) -> None:
        self._timer = None
        self._wait(returned=True)

    def _stop_waiting(self) -> None:
        """Leave the queue, if the call is in it, forget the timer, and do not ask the policy any more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        ranking, self._ranking = self._ranking, None
        if ranking is not None:
            ranking.cancel()
        place, self._place = self._place, None
        if place is not None:
            self._binding.joined(-1)
            self._pool.leave(place)

    def _granted(self, lease: CallPlace, *, patient: bool = True) -> None:
        """Its turn has come."""
        self._stop_waiting()
        if self._span is not None:
            self._span.event(time.monotonic(), "has a replica", lease.replica.name)
        opening = self._opening
        if opening is None or opening.done():  # cancelled in this very turn by the task that awaits it
            lease.end()
            return
        self._open(lease, self._deadline - time.monotonic(), patient=patient)
        if not opening.done():
            opening.set_result(None)

    def _denied(self, error: Exception) -> None:
        """Its turn came, with an error, or while the policy has not been asked: no replica could be called before."""
        self._stop_waiting()
        if self._opening is None or not self._opening.done():
            if self._context is None:  # the policy was a plain one; this may be the context of another call
                self._context = contextvars.Context()
            self._untaken(error, returned=True)

    def _gave_up(self) -> None:
        """Its time in the queue has run out."""
        waited = time.monotonic() - self._started
        self._denied(self._binding.refusal(f"none had room within {waited:.3g} s"))

    # ---- after a failure

    async def _recover(
        self, call: Any, error: grpc.aio.AioRpcError | asyncio.CancelledError, *, begun: bool = False
    ) -> None:
        """Open the call at another replica if it surely was not begun; otherwise raise the caller's error.

        gRPC itself cancels a call whose stream of requests can no longer be written, a moment before it has the
        status. That CancelledError must not reach the caller's task, which was not cancelled.
        """
        if not isinstance(error, grpc.aio.AioRpcError):
            task = asyncio.current_task()
            if self._ended or task is None or task.cancelling():
                raise error
            error = await error_of(call)
        if self._raised and error.code() is grpc.StatusCode.CANCELLED:
            raise self._raised[0]  # the transport has ended the call for it, and the replica did nothing wrong
        if call is not self._call:
            return  # another task that awaits this call has done it already
        now = time.monotonic()
        failure = CallFailure(error, self._deadline - now)
        if not self._ended:
            self._learn(failure, now)
        reason = failure.retry_reason
        if reason is None or begun or self._ended or not self._may_move() or now >= self._deadline:
            where = f"{self._method.path[1:]} at {self._binding.service} replica {self._lease.replica.name}"
            raise failure.as_seen(where, self._limit) from error
        self._binding.retried(reason)
        if self._span is not None:
            self._span.event(now, f"is tried again: {reason}", f"replica {self._lease.replica.name}: {error.details()}")
        self._again(reason, now)

    def _may_move(self) -> bool:
        """Whether the whole request is still at hand, so that it can be sent again."""
        return True

    def _learn(self, failure: CallFailure, now: float) -> None:
        """Report to the pool what the failure says about the replica."""
        pool, lease = self._pool, self._lease
        if failure.retry_reason == "draining":
            pool.refuses(lease.replica)
        elif failure.retry_reason == "overloaded":
            pool.refused(lease, failure.ongoing)
        elif failure.worked:
            self._report(failure.trailers, now)
        blame = failure.blame
        if blame is Blame.BROKEN:
            if not failure.worked:
                lease.replica.connection.check()
            pool.failed(lease, now)
        elif blame is Blame.LATE and not self._patient:
            # A patient call may have queued at the replica until its deadline: that is overload, not a fault.
            pool.timed_out(lease, now)
        elif blame is Blame.ANSWERED:
            pool.answered(lease, now)

    def _again(self, reason: str, now: float) -> None:
        """Take another replica. A replica says seldom that it drains, so that needs no budget; other reasons do."""
        refused = self._lease.replica
        self._call = None
        if reason == "draining" or self._pool.budget.spend(now):
            tried = self._tried = [*(self._tried or ()), refused]
            try:
                lease = self._pool.take(self._binding.router, self, now, tried)
            except (PierheadError, Unranked) as error:  # of the policy, which the service may have changed since
                self._untaken(error, returned=True)
                return
            if lease is not None:
                self._open(lease, self._deadline - now)
                return
            self._tried = None
            self._wait(returned=True)
        else:
            shortest, longest = BACKOFF_S
            self._tried = None
            self._opening = asyncio.get_running_loop().create_future()
            pause = min(longest, shortest * 2.0 ** min(self._pauses, 10), self._deadline - now)
            self._timer = self._binding.deadlines.add(now + pause, self._pause_over)
            self._pauses += 1

    # ---- ends

    def _succeeded(self) -> bool:
        """Count a success. Returns whether to read what the reply says of its replica."""
        if self._ended:
            return False
        self._ended = True
        now, lease, binding = time.monotonic(), self._lease, self._binding
        binding.succeeded(now - self._started)
        if self._span is not None:
            self._span.end_call(now, "OK", binding.service, lease.replica.name)
        if self._method.kind is MethodKind.UNARY_UNARY:
            binding.took(now - lease.began)
        self._pool.answered(lease, now)
        if self._callbacks is not None:
            self._call_back()
        return self._pool.wants_report(lease.replica, now, self.model_id)

    async def _read_report(self) -> None:
        """Read the replica's load from the reply, which models it holds, and what it publishes."""
        self._report(Trailers(await self._call.trailing_metadata()), time.monotonic())

    def _report(self, said: Trailers, now: float) -> None:
        if said.ongoing is not None:
            held, stats = parse_announcement(said.models), parse_stats(said.stats)
            self._pool.report(self._lease, count(said.ongoing), now, held, stats)

    def _failed(self, error: BaseException) -> None:
        """Count a failure; when the caller was cancelled, cancel the call."""
        if isinstance(error, PierheadError):
            self._end(error.kind)
        elif isinstance(error, asyncio.CancelledError):
            self.cancel()
            self._end("cancelled")
        else:
            self.cancel()
            self._end("error")

    def _end(self, outcome: str, *, call_back_soon: bool = False) -> None:
        """Count the outcome, once, and run the callbacks: now, or in a later turn of the loop."""
        if self._ended:
            return
        self._ended = True
        now = time.monotonic()
        self._binding.ended(outcome, now - self._started)
        if self._span is not None:
            replica = "" if self._call is None else self._lease.replica.name
            self._span.end_call(now, outcome, self._binding.service, replica)
        if self._callbacks is None:
            return
        if call_back_soon:
            self._binding.loop.call_soon(self._call_back)
        else:
            self._call_back()

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that awaiting a transport's ended call would raise."""
    initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
    return grpc.aio.AioRpcError(await call.code(), initial, trailing, await call.details())
