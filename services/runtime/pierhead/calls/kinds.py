"""Calls through a handle, one class per kind, each with the interface of `grpc.aio`'s own."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any

import grpc

from pierhead.calls.call import Call, error_of

if TYPE_CHECKING:
    from pierhead.calls.binding import Binding
    from pierhead.lanes.connection import Method


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
                    yield from self._recover(call, error).__await__()
                else:
                    if self._succeeded():
                        yield from self._read_report().__await__()
                    return reply
        except BaseException as error:
            self._failed(error)
            raise


class _ManyReplies(Call):
    """Kinds that are iterated over or read."""

    _has_read = False

    def __aiter__(self) -> AsyncIterator[Any]:
        """The reply messages. Raises a PierheadError. Leaving the loop drops the call, which cancels it, unless the
        caller holds it; see `aclose`.
        """
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def aclose(self) -> None:
        """Cancel the call unless it has ended: `async with contextlib.aclosing(stub.Method(...)) as replies:`."""
        self.cancel()
        self._end("cancelled")

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`. Raises a PierheadError."""
        try:
            while True:
                call = self._call if self._call is not None else await self._opened()
                try:
                    message = await call.read()
                except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                    await self._recover(call, error, begun=self._has_read)
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
        """The messages that have arrived already, without waiting for any; none where the transport does not know."""
        ready = getattr(self._call, "read_ready", None)
        messages: list[Any] = ready() if ready is not None else []
        if messages and not self._has_read:
            self._answered()
        return messages

    def deliver(self, sink: Callable[[list[Any]], bool]) -> None:
        """Call `sink(messages)` in the turn of the event loop in which messages arrive: no task is woken for them.
        For code that only forwards messages; `sink` has to take all of them.

        It returns False to receive no more until `deliver` is called again. Messages that do not go to `sink` are read
        as usual: every message over plain gRPC, large messages, and messages after it has returned False.
        The end of the call, and what `sink` raises, are raised where the call is read. Call it after the first
        message. `sink` runs in the context of the code that called this (`current_request()`), in no task of its own.
        """
        deliver = getattr(self._call, "deliver", None)
        if deliver is not None and self._has_read:
            # The task that reads the lane runs in the context of another request, the one that opened the lane.
            context = contextvars.copy_context()
            deliver(lambda messages: context.run(sink, messages))

    def lend(self, fd: int | None) -> None:
        """Lend the connection of a client to the replica, which has said in its first message that it borrows it: it
        then writes chunks of the answer itself. None: none can be lent.
        """
        lend = getattr(self._call, "lend", None)
        if lend is not None:
            lend(fd)

    def _answered(self) -> None:
        """The first message came: the replica works, and has begun the call."""
        self._has_read = True
        self._request = None  # frees memory: the call moves to no other replica, and a stream lasts long
        self._pool.answered(self._lease, time.monotonic())


class _ManyRequests(Call):
    """Kinds with a stream of requests: from an iterator, or written one by one."""

    _has_written = False

    def __init__(self, binding: Binding, method: Method, request: Any, *options: Any) -> None:
        self._raised = raised = list[Exception]()
        super().__init__(binding, method, None if request is None else _kept(request, raised), *options)

    @property
    def request(self) -> Any:
        """None: policies cannot choose by a stream."""
        return None

    def _may_move(self) -> bool:
        return self._request is None and not self._has_written

    async def write(self, request: Any) -> None:
        """Send one message. Raises a PierheadError."""
        await self._send(lambda call: call.write(request))

    async def done_writing(self) -> None:
        """End the stream of requests."""
        await self._send(lambda call: call.done_writing())

    async def _send(self, send: Callable[[Any], Awaitable[None]]) -> None:
        try:
            while True:
                call = await self._opened()
                try:
                    await send(call)
                except grpc.aio.AioRpcError as error:
                    await self._recover(call, error)
                except asyncio.InvalidStateError:
                    if self._has_written or not call.done():
                        raise
                    # A plain channel raises this when the call ended before anything could be sent.
                    await self._recover(call, await error_of(call))
                else:
                    self._has_written = True
                    return
        except BaseException as error:
            self._failed(error)
            raise


async def _kept(requests: Any, raised: list[Exception]) -> AsyncGenerator[Any, None]:
    """The messages of an iterator; its exception is put into `raised`, as transports only cancel the call.

    Does not refer to the call: a call that is no longer referenced has to end.
    """
    try:
        if hasattr(requests, "__aiter__"):
            async for request in requests:
                yield request
        else:
            for request in requests:
                yield request
    except Exception as error:
        raised.append(error)
        raise


class UnaryUnaryCall(_OneReply, grpc.aio.UnaryUnaryCall):  # type: ignore[type-arg]
    """One request, one reply."""


class UnaryStreamCall(_ManyReplies, grpc.aio.UnaryStreamCall):  # type: ignore[type-arg]
    """One request, many replies; another replica may be tried until the first of them."""


class StreamUnaryCall(_ManyRequests, _OneReply, grpc.aio.StreamUnaryCall):  # type: ignore[type-arg]
    """Many requests, one reply; another replica may be tried until the first request is written."""


class StreamStreamCall(_ManyRequests, _ManyReplies, grpc.aio.StreamStreamCall):  # type: ignore[type-arg]
    """Many requests, many replies; likewise."""
