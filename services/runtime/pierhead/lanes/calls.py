"""Calls through a lane as their callers see them: what a plain gRPC channel would return, one class per kind.

A call is owned by its lane, which hands frames to it, until it has ended: by END, by its deadline, by `cancel`, or
because the lane was lost. How it ended never changes afterwards.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import grpc

from pierhead.errors import ONGOING_KEY
from pierhead.lane.v1.lane_pb2 import Frame
from pierhead.lanes.metadata import Pair, unflatten
from pierhead.lanes.waiting import next_change, wake_all
from pierhead.lanes.window import ReceiveWindow, SendWindow

if TYPE_CHECKING:
    from pierhead.lanes.caller import CallerLane
    from pierhead.lanes.connection import Method

STATUS = {status.value[0]: status for status in grpc.StatusCode}

_OK = grpc.StatusCode.OK

_MESSAGE = Frame.MESSAGE
_HALF_CLOSE = Frame.HALF_CLOSE
_CANCEL = Frame.CANCEL
_CREDIT = Frame.CREDIT


class LaneCall:
    """What the four kinds share."""

    __slots__ = (
        "_callbacks", "_deadline", "_details", "_headers", "_lane", "_method", "_ongoing", "_status", "_trailers",
        "_until", "_waiters", "by_itself", "number",
    )  # fmt: skip

    def __init__(self, lane: CallerLane, number: int, method: Method, timeout: float) -> None:
        self._lane = lane
        self.number = number
        self._method = method
        self._status: grpc.StatusCode | None = None
        self._details = ""
        self._headers: tuple[Pair, ...] | None = None
        self._trailers: tuple[Pair, ...] = ()
        self._ongoing = 0
        self._callbacks: list[Callable[[Any], object]] | None = None
        self._waiters: list[asyncio.Future[None]] | None = None
        self.by_itself = False
        """Whether this side ended it, by `cancel`."""
        self._until = time.monotonic() + timeout
        self._deadline = lane.deadlines.add(self._until, self._expire)

    # ---- as grpc.aio.Call

    def cancel(self) -> bool:
        """End it here and tell the replica; False when it had ended."""
        if self._status is not None:
            return False
        self.by_itself = True
        self._lane.say(self.number, _CANCEL)
        self.end(grpc.StatusCode.CANCELLED, "cancelled by its caller")
        return True

    def cancelled(self) -> bool:
        """Whether it ended by cancellation."""
        return self._status is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        """Whether it has ended."""
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Have `callback(call)` called at the end."""
        if self._status is not None:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """What the replica sent first."""
        while self._headers is None and self._status is None:
            await self._change()
        return grpc.aio.Metadata(*(self._headers or ()))

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        """What the replica sent last, its load with it."""
        await self._end()
        return grpc.aio.Metadata(*self._all_trailers())

    async def code(self) -> grpc.StatusCode:
        """The status it ended with."""
        await self._end()
        assert self._status is not None  # noqa: S101
        return self._status

    async def details(self) -> str:
        """The message that came with the status."""
        await self._end()
        return self._details

    async def wait_for_connection(self) -> None:
        """Nothing: the lane is open."""

    # ---- what the lane tells

    def headers(self, pairs: tuple[Pair, ...]) -> None:
        """Initial metadata came."""
        self._headers = pairs
        self._wake()

    def credit(self, count: int) -> None:
        """The replica's consumer took messages. Means nothing to a call that sends one."""

    def message(self, item: bytes | Parcel, size: int) -> bool:
        """A message came; False when the replica had no right to send it."""
        return False

    def finish(self, frame: Frame) -> None:
        """END came."""
        self._ongoing = frame.ongoing_plus_one
        trailers = frame.metadata
        if trailers:
            self._trailers = unflatten(trailers)
            self._lane.learn(self._trailers)
        status = frame.status
        if status:
            self.end(STATUS.get(status, grpc.StatusCode.UNKNOWN), frame.details)
        else:
            self.end(_OK)

    def end(self, status: grpc.StatusCode, details: str = "") -> None:
        """It is over, for whatever reason; the first one counts."""
        if self._status is not None:
            return
        self._status = status
        self._details = details
        self._deadline.cancel()
        self._lane.forget(self.number)
        self._wake()
        callbacks, self._callbacks = self._callbacks, None
        if callbacks is not None:
            for callback in callbacks:
                callback(self)

    # ---- inside

    def _expire(self) -> None:
        self._lane.say(self.number, _CANCEL)
        self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _remaining(self) -> float:
        """Seconds until the deadline; it is of no matter any more once the call has ended."""
        return self._until - time.monotonic() if self._status is None else math.inf

    def _parcel_failed(self, error: grpc.aio.AioRpcError, what: str) -> None:
        """A large message could not be brought or fetched: that ends the call, of which work may have been done."""
        if self._status is not None:
            return
        code = error.code()
        if code not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED):
            code = grpc.StatusCode.UNAVAILABLE
        self._lane.say(self.number, _CANCEL)
        # In front: what gRPC says must not be taken for the failure of a call that was never begun.
        self.end(code, f"a large message of {self._method.path[1:]} could not be {what}: {error.details()}")

    def _wake(self) -> None:
        if self._waiters:
            wake_all(self._waiters)

    def _change(self) -> asyncio.Future[None]:
        """A future for the next change: a message, credit, the end."""
        if self._waiters is None:
            self._waiters = []
        return next_change(self._waiters)

    async def _end(self) -> None:
        while self._status is None:
            await self._change()

    def _all_trailers(self) -> tuple[Pair, ...]:
        if not self._ongoing:
            return self._trailers
        return (*self._trailers, *self._lane.models, *self._lane.stats, (ONGOING_KEY, str(self._ongoing - 1)))

    def _raise(self) -> None:
        """Raise what a call that did not end well raises."""
        if self.by_itself:
            raise asyncio.CancelledError
        if self._status is not grpc.StatusCode.OK:
            assert self._status is not None  # noqa: S101
            raise grpc.aio.AioRpcError(
                self._status,
                grpc.aio.Metadata(*(self._headers or ())),
                grpc.aio.Metadata(*self._all_trailers()),
                self._details,
            )


class Parcel:
    """A message that the replica keeps to be fetched beside the lane."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _OneReply(LaneCall):
    """Kinds that are awaited."""

    __slots__ = ("_fetching", "_reply")

    def __init__(self, lane: CallerLane, number: int, method: Method, timeout: float) -> None:
        super().__init__(lane, number, method, timeout)
        self._reply: bytes | None = None
        self._fetching: asyncio.Task[None] | None = None

    def finish(self, frame: Frame) -> None:
        """END came, with the reply when all went well. The call has ended when a large one is here as well: until then
        its deadline holds, and whoever counts calls counts this one.
        """
        if not frame.parcel:
            self._reply = frame.message if frame.has_message else None
            super().finish(frame)
        elif self._fetching is None:
            if frame.metadata:  # also if it ends before its reply is here
                self._lane.learn(unflatten(frame.metadata))
            # Owned by the call: it ends with it.
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(frame), name="large reply of a call")

    def end(self, status: grpc.StatusCode, details: str = "") -> None:
        """It is over; a reply that is on its way is of no interest any more."""
        super().end(status, details)
        if self._fetching is not None and self._fetching is not asyncio.current_task():
            self._fetching.cancel()

    async def _fetch(self, frame: Frame) -> None:
        try:
            self._reply = await self._lane.fetch(self.number, frame.parcel, self._remaining())
        except grpc.aio.AioRpcError as error:
            self._parcel_failed(error, "fetched")
        else:
            super().finish(frame)

    def __await__(self) -> Generator[Any, None, Any]:
        """The reply message. Raises AioRpcError, or CancelledError after `cancel`."""
        while self._status is None:
            try:
                yield from self._change()
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._status is not grpc.StatusCode.OK:
            self._raise()
        decode = self._method.response_deserializer
        return self._reply if decode is None else decode(self._reply)  # type: ignore[arg-type]


class _ManyReplies(LaneCall):
    """Kinds that are iterated over or read."""

    __slots__ = ("_failure", "_inbox", "_sink", "_window")

    def __init__(self, lane: CallerLane, number: int, method: Method, timeout: float) -> None:
        super().__init__(lane, number, method, timeout)
        self._inbox: deque[tuple[bytes | Parcel, int]] = deque()
        self._window = ReceiveWindow(lane.window)
        self._sink: Callable[[list[Any]], bool] | None = None
        self._failure: Exception | None = None
        """What handing over has failed with; whoever reads is told."""

    def message(self, item: bytes | Parcel, size: int) -> bool:
        """A message came."""
        inbox = self._inbox
        inbox.append((item, size))
        if self._sink is None:
            self._wake()
        elif len(inbox) == 1:
            self._lane.pours.append(self)  # once it has handed out the whole packet
        return self._window.arrive(size)

    def deliver(self, sink: Callable[[list[Any]], bool]) -> None:
        """Have `sink(messages)` called with what is there and with what comes, in the turn of the loop in which it
        comes, all of one packet at once: no task is woken for it. It takes all that it is given, and returns False to
        be given no more: what comes then is there to be read, as are large messages, which have to be fetched. Whoever
        reads sees the end, and what `sink` raises.
        """
        self._sink = sink
        if self._inbox:
            self.pour()

    def pour(self) -> None:
        """Hand over what has come."""
        sink = self._sink
        if sink is None:
            return
        more = False
        try:
            ready = self.read_ready()
            more = not ready or sink(ready)
        except asyncio.CancelledError as error:  # nobody has cancelled the lane
            self._failure = RuntimeError("what was to take the messages of a call was cancelled")
            self._failure.__cause__ = error
        except Exception as error:
            self._failure = error
        if not more or self._inbox:
            self._sink = None
            self._wake()

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`. Raises AioRpcError, or CancelledError after `cancel`."""
        while True:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._inbox and not self._given_up():
                item, size = self._inbox.popleft()
                return await self._take(item, size)
            if self._status is not None:
                self._inbox.clear()
                self._raise()
                return grpc.aio.EOF
            await self._change()

    def read_ready(self) -> list[Any]:
        """The messages that have arrived already, without waiting; a parcel, which has to be fetched, ends the list."""
        ready: list[Any] = []
        if self._given_up():
            return ready
        decode, inbox, owed = self._method.response_deserializer, self._inbox, 0
        while inbox and not isinstance(inbox[0][0], Parcel):
            item, size = inbox.popleft()
            owed += self._window.consume(size)
            ready.append(item if decode is None else decode(item))  # type: ignore[arg-type]
        if owed and self._status is None:
            self._lane.say(self.number, _CREDIT, credit=owed)
        return ready

    def __aiter__(self) -> AsyncIterator[Any]:
        """The reply messages."""
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    def _given_up(self) -> bool:
        """Whether what has arrived is of no interest any more: this side ended the call."""
        return self.by_itself or self._status is grpc.StatusCode.DEADLINE_EXCEEDED

    async def _take(self, item: bytes | Parcel, size: int) -> Any:
        raw = await self._fetch_item(item) if isinstance(item, Parcel) else item
        owed = self._window.consume(size)
        if owed and self._status is None:
            self._lane.say(self.number, _CREDIT, credit=owed)
        decode = self._method.response_deserializer
        return raw if decode is None else decode(raw)

    async def _fetch_item(self, item: Parcel) -> bytes:
        try:
            return await self._lane.fetch(self.number, item.number, self._remaining())
        except grpc.aio.AioRpcError as error:
            self._parcel_failed(error, "fetched")
            self._raise()
            raise


class _ManyRequests(LaneCall):
    """Kinds whose requests are a stream: from an iterator, or written one by one."""

    # No slots: a class cannot inherit from two that have some.

    def __init__(self, lane: CallerLane, number: int, method: Method, timeout: float, requests: Any) -> None:
        super().__init__(lane, number, method, timeout)
        self._room = SendWindow(lane.peer_window)
        self._parcels = 0
        self._closed = False
        self._sender: asyncio.Task[None] | None = None
        if requests is not None:
            # Owned by the call: it ends with it.
            self._sender = asyncio.get_running_loop().create_task(self._send_all(requests), name="requests of a call")

    def credit(self, count: int) -> None:
        """The replica's consumer took messages."""
        self._room.earn(count)
        self._wake()

    def end(self, status: grpc.StatusCode, details: str = "") -> None:
        """It is over; requests that were not sent are not sent any more."""
        super().end(status, details)
        if self._sender is not None and self._sender is not asyncio.current_task():
            self._sender.cancel()

    async def write(self, request: Any) -> None:
        """Send one message, when the replica takes it. Raises what the call ended with."""
        if self._sender is not None and self._sender is not asyncio.current_task():
            raise grpc.aio.UsageError("this call's requests come from an iterator; they cannot be written as well")
        encode = self._method.request_serializer
        raw = request if encode is None else encode(request)
        while self._status is None and not self._room.open:
            await self._change()
        if self._status is None and self._closed:
            raise asyncio.InvalidStateError("done_writing was called before: no message can follow")
        if self._status is None:
            self._room.spend(len(raw))
            if len(raw) <= self._lane.large:
                self._lane.say_message(self.number, raw)
                return
            self._parcels += 1
            await self._bring(raw)
            if self._status is None:
                return
        if self._status is not None:
            self._raise()
            raise asyncio.InvalidStateError("the replica has answered already: no message can follow")

    async def _bring(self, raw: bytes) -> None:
        try:
            await self._lane.bring(self.number, self._parcels, raw, self._remaining())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:  # the replica has answered already: its END is on its way
                await self._end()
            else:
                self._parcel_failed(error, "brought")

    async def done_writing(self) -> None:
        """Say that there are no more."""
        if self._status is None and not self._closed:
            self._closed = True
            self._lane.say(self.number, _HALF_CLOSE)

    async def _send_all(self, requests: AsyncIterator[Any] | Iterable[Any]) -> None:
        try:
            if inspect.isasyncgen(requests) or hasattr(requests, "__aiter__"):
                async for request in requests:
                    if self._status is not None:
                        return
                    await self.write(request)
            else:
                for request in requests:
                    if self._status is not None:
                        return
                    await self.write(request)
            await self.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the call has ended, and tells so itself
        except Exception as error:
            # As a plain channel has it: an iterator that fails cancels its call.
            if self._status is None:
                self._lane.say(self.number, _CANCEL)
                self.end(grpc.StatusCode.CANCELLED, f"the iterator of requests failed: {error!r}")


class UnaryUnaryLaneCall(_OneReply):
    """One request, one reply."""

    __slots__ = ()


class UnaryStreamLaneCall(_ManyReplies):
    """One request, many replies."""

    __slots__ = ()


class StreamUnaryLaneCall(_ManyRequests, _OneReply):
    """Many requests, one reply."""


class StreamStreamLaneCall(_ManyRequests, _ManyReplies):
    """Many requests, many replies."""
