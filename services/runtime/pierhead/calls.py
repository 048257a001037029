"""Calls through a handle, one class per kind; they look to their callers as `grpc.aio`'s own.

The life of a call:

    take a replica with room ---------> open the call there ----> reply
       | none                              | refused, or never sent
       v                                   v
    wait in line (bounded, deadline)    another replica (within the retry budget), else in line
       | deadline, line full
       v
    Backpressure, NoReplica

A call that a replica may have begun is never sent a second time, and neither is one of whose stream of requests
something was sent.

When a replica has room, which is nearly always, a call costs no task and no timer of ours: the transport's call is
opened at once, and awaiting ours awaits it. One that has to wait costs a place in the line and a deadline, and no task.

A call that nobody holds any more is cancelled: nobody can get its result, and it takes up a place at a replica. So
nothing that outlives a call (leases, transports) refers to it, except the line while it waits there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any

import grpc

from pierhead.connection import NEVER_SENT, Kind, Method
from pierhead.errors import (
    DeadlineExceeded,
    NoReplica,
    PayloadTooLarge,
    PierheadError,
    ReplicaDied,
    Trailers,
    from_status,
)
from pierhead.line import Place
from pierhead.multiplex_held import parse_announcement
from pierhead.request import CURRENT, MODEL_KEY, REQUEST_ID_KEY, SESSION_KEY, TRACEPARENT_KEY, new_request_id

if TYPE_CHECKING:
    from pierhead.binding import Binding
    from pierhead.deadlines import Deadline
    from pierhead.pool import Lease
    from pierhead.replica import Replica

TOO_LARGE = "larger than max"
"""What gRPC's core says of a message above max_receive_message_length or max_send_message_length."""

BACKOFF_S = (0.01, 0.5)
"""Shortest and longest pause of a call for which the retry budget has nothing left."""

LONGEST_S = 365 * 86_400.0
"""A timeout above this, infinity say, is one of this length: clocks and frames have no room for more."""

MOMENT_S = 0.01
"""gRPC keeps deadlines by a timer of its own: how a call has ended shows so much earlier, or later, than by ours."""

CORE_FAILED = "Internal error from Core"
"""How the message of a status begins that gRPC's Python layer makes up where an operation of its core failed."""

BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
)
"""Statuses that say that the service is broken, and not what was asked of it."""


class Call:
    """What calls of every kind share: choosing a replica, trying another, telling how it ended."""

    # What most calls never set is read from here.
    session_id: str | None = None
    model_id: str | None = None
    _call: Any = None
    """The transport's call; None while there is none."""
    _lease: Lease
    """Of the replica that has the call, or had it last."""
    _opening: asyncio.Future[None] | None = None
    """Done when the call is at a replica, or will never be; None when it was at once."""
    _place: Place | None = None
    _timer: Deadline | None = None
    _tried: list[Replica] | None = None
    _pauses = 0
    _patient = False
    """Whether the replica that has it may let it wait for a place."""
    _ended = False
    _callbacks: list[Callable[[Any], None]] | None = None

    def __init__(
        self,
        binding: Binding,
        method: Method,
        request: Any,
        timeout: float | None,
        metadata: Any,
        compression: Any,
    ) -> None:
        self._binding = binding
        self._pool = pool = binding.pool
        self._method = method
        self._request = request
        self._compression = compression
        self._started = now = time.monotonic()
        limit = binding.timeout_s if timeout is None else min(timeout, LONGEST_S)
        context = CURRENT.get()
        ours: tuple[tuple[str, str], ...]
        if context is None:
            ours = ((REQUEST_ID_KEY, new_request_id()),)
        else:
            request_id, deadline, traceparent, session_id, model_id = context
            if deadline - now < limit:
                limit = deadline - now
            ours = ((REQUEST_ID_KEY, request_id),)
            if traceparent is not None:
                ours += ((TRACEPARENT_KEY, traceparent),)
            if session_id is not None:
                ours += ((SESSION_KEY, session_id),)
                self.session_id = session_id
            if model_id is not None:
                ours += ((MODEL_KEY, model_id),)
                self.model_id = model_id
        self._metadata = ours
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
        except PierheadError as error:  # of the policy
            self._deny(error)
            return
        if lease is not None:
            self._open(lease, limit)
        else:
            self._wait()

    def __del__(self) -> None:
        # Not from another thread's garbage collection, nor when the loop is gone.
        if not self._ended and self._call is not None and self._binding.is_current():
            self.cancel()

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
        """Cancel the call, wherever it is: in line, or at the replica."""
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
        """Have `callback(call)` called when it has ended for its caller; a try that was refused is no end."""
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

    def _add_metadata(self, metadata: Any) -> None:
        """The caller's own, which also say for whom and for which model this one call is."""
        self._metadata += tuple(metadata)
        for key, value in metadata:
            if key == SESSION_KEY:
                self.session_id = value
            elif key == MODEL_KEY:
                self.model_id = value

    def _open(self, lease: Lease, timeout: float, *, patient: bool = False) -> None:
        """Open the call at the replica, or deny it with what the transport raises."""
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
        """The call will be at no replica; whoever awaits it is told why."""
        opening = self._opening
        if opening is None or opening.done():
            opening = self._opening = asyncio.get_running_loop().create_future()
        opening.set_exception(error)
        opening.exception()  # a caller who never asks must not be told of it by the loop

    async def _opened(self) -> Any:
        """The transport's call, once there is one. Raises why there will be none."""
        while self._call is None:
            assert self._opening is not None  # noqa: S101 - else `__init__` has not ended
            try:
                await self._opening
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._call

    # ---- waiting

    def _wait(self, *, returned: bool = False) -> None:
        """Stand in line. `returned`: the call was at a replica, which refused it."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_future()
        now = time.monotonic()
        try:
            patience = self._binding.patience(self._deadline - now, returned=returned)
        except PierheadError as error:
            self._deny(error)
            return
        self._place = place = Place(self._started, self, self._binding.router, self._granted, self._denied)
        self._timer = self._binding.deadlines.add(now + patience, self._gave_up)
        self._binding.joined(1)
        self._pool.join(place)

    def _pause(self, seconds: float) -> None:
        """Stand in line after a pause."""
        self._opening = asyncio.get_running_loop().create_future()
        self._timer = self._binding.deadlines.add(time.monotonic() + seconds, self._pause_over)

    def _pause_over(self) -> None:
        self._timer = None
        self._wait(returned=True)

    def _stop_waiting(self) -> None:
        """Leave the line, if the call is in it, and forget the timer."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        place, self._place = self._place, None
        if place is not None:
            self._binding.joined(-1)
            self._pool.leave(place)

    def _granted(self, lease: Lease) -> None:
        """Its turn has come."""
        self._stop_waiting()
        opening = self._opening
        if opening is None or opening.done():  # cancelled in this very turn by the task that awaits it
            lease.end()
            return
        self._open(lease, self._deadline - time.monotonic(), patient=True)
        if not opening.done():
            opening.set_result(None)

    def _denied(self, error: Exception) -> None:
        """Its turn came, and brought an error."""
        self._stop_waiting()
        if self._opening is None or not self._opening.done():
            self._deny(error)

    def _gave_up(self) -> None:
        """It has waited for as long as it makes sense."""
        waited = time.monotonic() - self._started
        self._denied(self._binding.refusal(f"none had room within {waited:.3g} s"))

    # ---- after a failure

    def _recover(self, call: Any, error: grpc.aio.AioRpcError, *, begun: bool = False) -> None:
        """Open the call elsewhere if it surely was not begun; otherwise raise what the caller is to see."""
        if call is not self._call:
            return  # another task that awaits this call has done it already
        trailers = Trailers(error.trailing_metadata())
        now = time.monotonic()
        reason = None if self._ended else self._learn(error, trailers, now)
        if reason is None or begun or not self._may_move() or now >= self._deadline:
            raise self._final(error, trailers) from error
        self._binding.retried(reason)
        self._again(reason, now)

    async def _failure(self, call: Any, error: grpc.aio.AioRpcError | asyncio.CancelledError) -> grpc.aio.AioRpcError:
        """How the call ended; raises `error` when it was this side that cancelled it.

        gRPC by itself cancels a call whose stream of requests cannot be written any more, a moment before it learns
        why. Passed on, that would end a task of the caller's that nobody has cancelled.
        """
        if isinstance(error, grpc.aio.AioRpcError):
            return error
        task = asyncio.current_task()
        if self._ended or task is None or task.cancelling():
            raise error
        return await _error_of(call)

    def _status_of(self, error: grpc.aio.AioRpcError) -> grpc.StatusCode:
        """The status of a call that the replica did not answer. Past its deadline it has met that.

        What gRPC names as the cause then depends on what it was about to do when its timer struck.
        """
        named = error.code()
        unclear = named is grpc.StatusCode.CANCELLED or CORE_FAILED in (error.details() or "")
        if unclear and time.monotonic() > self._deadline - MOMENT_S:
            return grpc.StatusCode.DEADLINE_EXCEEDED
        return named

    def _may_move(self) -> bool:
        """Whether all of the request is at hand after it was sent."""
        return True

    def _learn(self, error: grpc.aio.AioRpcError, trailers: Trailers, now: float) -> str | None:
        """Tell the pool what the failure says of the replica. None when work may have begun, else why not."""
        pool, lease = self._pool, self._lease
        if trailers.refused == "draining":
            pool.refuses(lease.replica)
            return "draining"
        if trailers.refused is not None:
            pool.refused(lease, _count(trailers.ongoing))
            return "overloaded"
        worked = trailers.ongoing is not None
        code = error.code() if worked else self._status_of(error)
        if worked:
            pool.report(lease, _count(trailers.ongoing), now, _models(trailers.models))
        if code in BROKEN:
            if not worked:
                lease.replica.connection.check()
            pool.failed(lease, now)
            if (error.details() or "").startswith(NEVER_SENT) and not worked:
                return "connect"
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            # A patient call may have waited for a place all the time: that is overload, and no fault.
            if not worked and not self._patient:
                pool.timed_out(lease, now)
        elif code is not grpc.StatusCode.CANCELLED:
            pool.answered(lease, now)
        return None

    def _again(self, reason: str, now: float) -> None:
        """Take another replica. A drain is announced once per replica, so it needs no budget; all else does."""
        refused = self._lease.replica
        self._call = None
        if reason == "draining" or self._pool.budget.take(now):
            tried = self._tried = [*(self._tried or ()), refused]
            try:
                lease = self._pool.take(self._binding.router, self, now, tried)
            except PierheadError as error:  # of the policy
                self._deny(error)
                return
            if lease is not None:
                self._open(lease, self._deadline - now)
                return
            self._tried = None
            self._wait(returned=True)
        else:
            shortest, longest = BACKOFF_S
            self._tried = None
            self._pause(min(longest, shortest * 2.0**self._pauses, self._deadline - now))
            self._pauses += 1

    def _final(self, error: grpc.aio.AioRpcError, trailers: Trailers) -> PierheadError:
        """What the caller sees: the callee's own error where it spoke, else what happened on the way."""
        code, details = error.code(), error.details() or ""
        if trailers.kind is not None or trailers.ongoing is not None:
            return from_status(code, details, trailers)
        code = self._status_of(error)
        where = f"{self._method.path[1:]} at {self._binding.service} replica {self._lease.replica.name}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{where}: no reply within {self._limit:.3g} s")
        if details.startswith(NEVER_SENT):
            return NoReplica(f"{where}: not connected, and a call that sends a stream is not moved ({details})")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return ReplicaDied(f"{where}: it went away after it may have begun; not repeated, the work may be done")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in details:
            return PayloadTooLarge(f"{where}: {details}")
        return from_status(code, f"{where}: {details}", trailers)

    # ---- ends

    def _succeeded(self) -> bool:
        """Count a success. Returns whether to read what the reply says of its replica."""
        if self._ended:
            return False
        self._ended = True
        now, lease, binding = time.monotonic(), self._lease, self._binding
        binding.succeeded(now - self._started)
        if self._method.kind is Kind.UNARY_UNARY:
            binding.took(now - lease.began)
        self._pool.answered(lease, now)
        if self._callbacks is not None:
            self._call_back()
        return self._pool.wants_report(lease.replica, now, self.model_id)

    async def _read_report(self) -> None:
        """Read the replica's load from the reply, and which models it holds."""
        trailers = Trailers(await self._call.trailing_metadata())
        if trailers.ongoing is not None:
            self._pool.report(self._lease, _count(trailers.ongoing), time.monotonic(), _models(trailers.models))

    def _failed(self, error: BaseException) -> None:
        """Count a failure; a cancelled caller takes the call with it."""
        if isinstance(error, PierheadError):
            self._end(error.kind)
        elif isinstance(error, asyncio.CancelledError):
            self.cancel()
            self._end("cancelled")
        else:
            self.cancel()
            self._end("error")

    def _end(self, outcome: str) -> None:
        if not self._ended:
            self._ended = True
            self._binding.ended(outcome, time.monotonic() - self._started)
            if self._callbacks is not None:
                self._call_back()

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)


class _OneReply(Call):
    """Kinds that are awaited."""

    def __await__(self) -> Generator[Any, None, Any]:
        """The reply message. Raises a PierheadError."""
        try:
            while True:
                call = self._call
                if call is None:
                    call = yield from self._opened().__await__()
                try:
                    reply = yield from call.__await__()
                except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                    self._recover(call, (yield from self._failure(call, error).__await__()))
                else:
                    if self._succeeded():
                        yield from self._read_report().__await__()
                    return reply
        except BaseException as error:
            self._failed(error)
            raise


class _ManyReplies(Call):
    """Kinds that are iterated over or read."""

    _iterated: Any = None
    """The transport's call whose replies are iterated over."""
    _next: Callable[[], Awaitable[Any]] | None = None
    """Its next reply."""
    _has_read = False

    def __aiter__(self) -> AsyncIterator[Any]:
        """The reply messages. Raises a PierheadError. Leaving the loop drops the call, which cancels it, unless the
        caller holds it; see `aclose`.
        """
        return self

    async def __anext__(self) -> Any:
        try:
            while True:
                if self._next is None:
                    self._iterated = await self._opened()
                    self._next = aiter(self._iterated).__anext__
                try:
                    message = await self._next()
                except StopAsyncIteration:
                    if self._succeeded():
                        await self._read_report()
                    raise
                except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                    self._next = None
                    failure = await self._failure(self._iterated, error)
                    self._recover(self._iterated, failure, begun=self._has_read)
                else:
                    if not self._has_read:
                        self._answered()
                    return message
        except StopAsyncIteration:
            raise
        except BaseException as error:
            self._failed(error)
            raise

    async def aclose(self) -> None:
        """Cancel the call unless it has ended: `async with contextlib.aclosing(stub.Method(...)) as replies:`."""
        self.cancel()
        self._end("cancelled")

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`. Raises a PierheadError."""
        try:
            while True:
                call = await self._opened()
                try:
                    message = await call.read()
                except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                    self._recover(call, await self._failure(call, error), begun=self._has_read)
                    continue
                if message is not grpc.aio.EOF:
                    if not self._has_read:
                        self._answered()
                elif self._succeeded():
                    await self._read_report()
                return message
        except BaseException as error:
            self._failed(error)
            raise

    def read_ready(self) -> list[Any]:
        """The messages that have arrived already, without waiting for any; none where the transport cannot tell."""
        ready = getattr(self._call, "read_ready", None)
        messages: list[Any] = ready() if ready is not None else []
        if messages and not self._has_read:
            self._answered()
        return messages

    def _answered(self) -> None:
        """The first message came: work has begun, and the replica is known to work."""
        self._has_read = True
        self._pool.answered(self._lease, time.monotonic())


class _ManyRequests(Call):
    """Kinds whose requests are a stream: from an iterator, or written one by one."""

    _has_written = False

    @property
    def request(self) -> Any:
        """None: there is no one message to choose a replica by."""
        return None

    def _may_move(self) -> bool:
        return self._request is None and not self._has_written

    async def write(self, request: Any) -> None:
        """Send one message. Raises a PierheadError."""
        await self._send(lambda call: call.write(request))

    async def done_writing(self) -> None:
        """Say that there are no more."""
        await self._send(lambda call: call.done_writing())

    async def _send(self, send: Callable[[Any], Awaitable[None]]) -> None:
        try:
            while True:
                call = await self._opened()
                try:
                    await send(call)
                except grpc.aio.AioRpcError as error:
                    self._recover(call, error)
                except asyncio.InvalidStateError:
                    if self._has_written or not call.done():
                        raise
                    # How a plain channel tells that it was over before anything could be sent.
                    self._recover(call, await _error_of(call))
                else:
                    self._has_written = True
                    return
        except BaseException as error:
            self._failed(error)
            raise


class UnaryUnaryCall(_OneReply, grpc.aio.UnaryUnaryCall):  # type: ignore[type-arg]
    """One request, one reply."""


class UnaryStreamCall(_ManyReplies, grpc.aio.UnaryStreamCall):  # type: ignore[type-arg]
    """One request, many replies; another replica may be tried until the first of them."""


class StreamUnaryCall(_ManyRequests, _OneReply, grpc.aio.StreamUnaryCall):  # type: ignore[type-arg]
    """Many requests, one reply; another replica may be tried until the first request is written."""


class StreamStreamCall(_ManyRequests, _ManyReplies, grpc.aio.StreamStreamCall):  # type: ignore[type-arg]
    """Many requests, many replies; likewise."""


async def _error_of(call: Any) -> grpc.aio.AioRpcError:
    """What a call that has ended would raise where it is awaited."""
    initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
    return grpc.aio.AioRpcError(await call.code(), initial, trailing, await call.details())


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0


def _models(text: str | None) -> frozenset[str] | None:
    return None if text is None else parse_announcement(text)
