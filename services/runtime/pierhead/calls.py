"""Calls through a handle, one class per kind; they look to their callers as `grpc.aio`'s own.

The life of a call:

    take a replica with room ---------> open the call there ----> reply
       | none                              | refused, or never sent
       v                                   v
    wait in line (bounded, deadline)    another replica (within the retry budget), else in line
       | deadline, line full
       v
    Backpressure, NoReplica

A call that a replica may have begun is never sent a second time, and neither is one whose requests are a stream: its
replica is chosen once.

When a replica has room, which is nearly always, a call costs no task and no timer of ours: gRPC's call is opened at
once, and awaiting ours awaits it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
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
from pierhead.pool import Lease, Replica
from pierhead.request import CURRENT, MODEL_KEY, REQUEST_ID_KEY, SESSION_KEY, TRACEPARENT_KEY, new_request_id

if TYPE_CHECKING:
    from pierhead.channel import HandleChannel

TOO_LARGE = "larger than max"
"""What gRPC's core says of a message above max_receive_message_length or max_send_message_length."""

_PASSED_ON = (TRACEPARENT_KEY, SESSION_KEY, MODEL_KEY)
"""The keys of what a RequestContext holds from its third field on."""

_NOTHING_MORE = (None, None, None)

RETRY_REASONS = ("overloaded", "draining", "connect")
"""Why a call may go to another replica: none of its work was begun."""

BACKOFF_S = (0.01, 0.5)
"""Shortest and longest pause of a call for which the retry budget has nothing left."""


class Call:
    """What calls of every kind share: choosing a replica, trying another, telling how it ended."""

    repeatable = True
    """Whether the request is still at hand after it was sent."""

    def __init__(
        self,
        channel: HandleChannel,
        method: Method,
        request: Any,
        timeout: float | None,
        metadata: Any,
        compression: Any,
    ) -> None:
        self._channel = channel
        self._pool = pool = channel.pool()
        self._method = method
        self._request = request
        self._compression = compression
        self._started = now = time.monotonic()
        limit = channel.timeout_s if timeout is None else timeout
        context = CURRENT.get()
        ours: tuple[tuple[str, str], ...]
        if context is None:
            ours = ((REQUEST_ID_KEY, new_request_id()),)
        else:
            limit = min(limit, context.deadline - now)
            ours = ((REQUEST_ID_KEY, context.request_id),)
            if context[2:] != _NOTHING_MORE:
                ours += tuple(
                    (key, value) for key, value in zip(_PASSED_ON, context[2:], strict=True) if value is not None
                )
        self._metadata = (*ours, *metadata) if metadata else ours
        self._limit = limit
        self._deadline = now + limit
        self._tried: list[Replica] = []
        self._pauses = 0
        self._opened_at = now
        self._ended = False
        self._callbacks: list[Callable[[Any], None]] = []
        self._call: Any = None
        self._replica: Replica | None = None
        self._lease: Lease
        self._opening: asyncio.Task[None] | None = None
        pool.budget.called()
        replica = pool.take(channel.policy)
        if replica is not None:
            self._open(replica, limit)
        else:
            self._open_later(self._wait_and_open())

    # ---- as grpc.aio.Call

    def cancel(self) -> bool:
        """Cancel the call, wherever it is: in line, or at the replica."""
        running = self._call if self._call is not None else self._opening
        cancelled = running is not None and bool(running.cancel())
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

    # ---- opening

    def _open(self, replica: Replica, timeout: float) -> None:
        lease = Lease(self._pool, replica)
        try:
            call = replica.connection.open(self._method, self._request, timeout, self._metadata, self._compression)
        except BaseException:
            lease.end()
            raise
        # gRPC calls this however the call ends, also when it is dropped: the count cannot leak.
        call.add_done_callback(lease.end)
        self._lease = lease
        self._replica = replica
        self._call = call
        self._opened_at = time.monotonic()

    def _open_later(self, opening: Coroutine[Any, Any, None]) -> None:
        self._opening = asyncio.get_running_loop().create_task(opening, name="wait for a replica")
        # Owned by this call; a caller who drops the call without awaiting it must not be told of it by the loop.
        self._opening.add_done_callback(_retrieve)

    async def _wait_and_open(self, *, first: bool = False) -> None:
        replica = await self._channel.wait_in_line(self._pool, self._deadline, first=first)
        self._open(replica, self._deadline - time.monotonic())

    async def _pause_and_open(self, pause: float) -> None:
        if pause:
            await asyncio.sleep(pause)
        await self._wait_and_open(first=True)

    async def _opened(self) -> Any:
        if self._call is None and self._opening is not None:
            await self._opening
        return self._call

    # ---- ends

    async def _recover(self, error: grpc.aio.AioRpcError, *, begun: bool = False) -> None:
        """Open the call elsewhere if it surely was not begun; otherwise raise what the caller is to see."""
        trailers = Trailers(error.trailing_metadata())
        reason = self._why_not_begun(error, trailers)
        if reason is None or begun or not self.repeatable:
            raise self._final(error, trailers) from error
        self._channel.retried(reason)
        await self._again(reason)

    def _why_not_begun(self, error: grpc.aio.AioRpcError, trailers: Trailers) -> str | None:
        """Tell the pool what the failure says of the replica. None when work may have begun."""
        replica = self._replica
        assert replica is not None  # noqa: S101 - it has just answered
        if trailers.refused == "draining":
            self._pool.refuses(replica)
            return "draining"
        if trailers.refused is not None:
            self._pool.refused(replica, _count(trailers.ongoing), self._lease.left)
            return "overloaded"
        if trailers.ongoing is not None:  # it worked on the call, and says so with its load
            self._pool.report(replica, _count(trailers.ongoing), self._lease.left, time.monotonic())
        elif error.code() is grpc.StatusCode.UNAVAILABLE:
            replica.connection.check()
            if (error.details() or "").startswith(NEVER_SENT):
                return "connect"
        return None

    async def _again(self, reason: str) -> None:
        """Take another replica. A drain is announced once per replica, so it needs no budget; all else does."""
        if self._replica is not None:
            self._tried.append(self._replica)
        self._call = None
        now = time.monotonic()
        pause = 0.0
        if reason == "draining" or self._pool.budget.take(now):
            replica = self._pool.take(self._channel.policy, self._tried)
            if replica is not None:
                self._open(replica, self._deadline - now)
                return
        else:
            shortest, longest = BACKOFF_S
            pause = min(longest, shortest * 2**self._pauses, max(0.0, self._deadline - now))
            self._pauses += 1
        self._tried.clear()
        self._open_later(self._pause_and_open(pause))
        await self._opened()

    def _final(self, error: grpc.aio.AioRpcError, trailers: Trailers) -> PierheadError:
        """What the caller sees: the callee's own error where it spoke, else what happened on the way."""
        code, details = error.code(), error.details() or ""
        if trailers.kind is not None or trailers.ongoing is not None:
            return from_status(code, details, trailers)
        name = self._replica.name if self._replica is not None else "no replica"
        where = f"{self._method.path[1:]} at {self._channel.service} replica {name}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{where}: no reply within {self._limit:.3g} s")
        if details.startswith(NEVER_SENT):
            return NoReplica(f"{where}: not connected, and a call that sends a stream is not moved ({details})")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return ReplicaDied(f"{where}: it went away after it may have begun; not repeated, the work may be done")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in details:
            return PayloadTooLarge(f"{where}: {details}")
        return from_status(code, f"{where}: {details}", trailers)

    async def _replied(self) -> None:
        """Count a success, and read the replica's load from it now and then."""
        replica, now = self._replica, time.monotonic()
        self._end("ok", now)
        if self._method.kind is Kind.UNARY_UNARY:
            self._channel.took(now - self._opened_at)
        if replica is not None and self._pool.wants_report(replica, now):
            trailers = Trailers(await self._call.trailing_metadata())
            if trailers.ongoing is not None:
                self._pool.report(replica, _count(trailers.ongoing), self._lease.left, now)

    def _end(self, outcome: str, now: float | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._channel.ended(outcome, (now or time.monotonic()) - self._started)
            for callback in self._callbacks:
                callback(self)

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


class _OneReply(Call):
    """Kinds that are awaited."""

    def __await__(self) -> Generator[Any, None, Any]:
        """The reply message. Raises a PierheadError."""
        return self._reply().__await__()

    async def _reply(self) -> Any:
        try:
            while True:
                if self._call is None:
                    await self._opened()
                try:
                    reply = await self._call
                except grpc.aio.AioRpcError as error:
                    await self._recover(error)
                else:
                    await self._replied()
                    return reply
        except BaseException as error:
            self._failed(error)
            raise


class _ManyReplies(Call):
    """Kinds that are iterated over or read."""

    _iterator: AsyncIterator[Any] | None = None
    _has_read = False

    def __aiter__(self) -> AsyncIterator[Any]:
        """The reply messages. Raises a PierheadError; stopping early and closing the iterator cancels the call."""
        if self._iterator is None:
            self._iterator = self._messages()
        return self._iterator

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`. Raises a PierheadError."""
        try:
            while True:
                call = await self._opened()
                try:
                    message = await call.read()
                except grpc.aio.AioRpcError as error:
                    await self._recover(error, begun=self._has_read)
                    continue
                self._has_read = True
                if message is grpc.aio.EOF:
                    await self._replied()
                return message
        except BaseException as error:
            self._failed(error)
            raise

    async def _messages(self) -> AsyncIterator[Any]:
        begun = False
        try:
            while True:
                call = await self._opened()
                try:
                    async for message in call:
                        begun = True
                        yield message
                except grpc.aio.AioRpcError as error:
                    await self._recover(error, begun=begun)
                else:
                    await self._replied()
                    return
        except BaseException as error:
            self._failed(error)
            raise


class _ManyRequests(Call):
    """Kinds whose requests are a stream: from an iterator, or written one by one."""

    repeatable = False

    async def write(self, request: Any) -> None:
        """Send one message. Raises a PierheadError."""
        await self._send(lambda call: call.write(request))

    async def done_writing(self) -> None:
        """Say that there are no more."""
        await self._send(lambda call: call.done_writing())

    async def _send(self, action: Callable[[Any], Any]) -> None:
        try:
            await action(await self._opened())
        except grpc.aio.AioRpcError as error:
            final = self._final(error, Trailers(error.trailing_metadata()))
            self._failed(final)
            raise final from error
        except BaseException as error:
            self._failed(error)
            raise


class UnaryUnaryCall(_OneReply, grpc.aio.UnaryUnaryCall):  # type: ignore[type-arg]
    """One request, one reply."""


class UnaryStreamCall(_ManyReplies, grpc.aio.UnaryStreamCall):  # type: ignore[type-arg]
    """One request, many replies; another replica may be tried until the first of them."""


class StreamUnaryCall(_ManyRequests, _OneReply, grpc.aio.StreamUnaryCall):  # type: ignore[type-arg]
    """Many requests, one reply."""


class StreamStreamCall(_ManyRequests, _ManyReplies, grpc.aio.StreamStreamCall):  # type: ignore[type-arg]
    """Many requests, many replies."""


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
