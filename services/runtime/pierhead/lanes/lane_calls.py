"""The call objects of a lane, one class per kind, with the interface of a plain gRPC channel's calls.

A call is owned by its lane, which passes frames to it until it has ended: by END, by its deadline, by `cancel`, or
because the lane was lost. Its outcome never changes afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from pierhead.edge.methods import status_of
from pierhead.errors import ONGOING_KEY
from pierhead.lane.v1.lane_pb2 import Frame
from pierhead.lanes.metadata import Pair, unflatten
from pierhead.lanes.window import ReceiveWindow
from pierhead.memory import process
from pierhead.tasks import next_change, wake_all

if TYPE_CHECKING:
    from pierhead.lanes.client import CallerLane
    from pierhead.lanes.connection import Method
    from pierhead.memory.sharing import Sharing

_OK = grpc.StatusCode.OK

_CANCEL = Frame.CANCEL
_CREDIT = Frame.CREDIT


class LaneCall:
    """What both kinds share."""

    __slots__ = (
        "_callbacks", "_deadline", "_details", "_headers", "_lane", "_method", "_ongoing", "_sharing", "_status",
        "_trailers", "_until", "_waiters", "by_itself", "number",
    )  # fmt: skip

    def __init__(
        self, lane: CallerLane, number: int, method: Method, timeout: float, sharing: Sharing | None = None
    ) -> None:
        self._sharing = sharing
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
        """End it here and at the replica; False if it had ended already."""
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
        """Call `callback(call)` at the end."""
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
        """What the replica sent last, with its load."""
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
        """Does nothing: the lane is open."""

    # ---- frames from the lane

    def headers(self, pairs: tuple[Pair, ...]) -> None:
        """Initial metadata came."""
        self._headers = pairs
        self._wake()

    def message(self, item: bytes | Parcel, size: int) -> bool:
        """A message came; False if the replica exceeded its window."""
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
            self.end(status_of(status), frame.details)
        else:
            self.end(_OK)

    def end(self, status: grpc.StatusCode, details: str = "") -> None:
        """The call is over, for whatever reason; the first reason counts."""
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

    async def _fetched(self, parcel: int) -> bytes:
        """Fetch a large message that the replica keeps. Raises AioRpcError; the call has then ended."""
        try:
            # The deadline does not matter any more once the call has ended.
            remaining = self._until - time.monotonic() if self._status is None else float("inf")
            return await self._lane.fetch(self.number, parcel, remaining)
        except grpc.aio.AioRpcError as error:
            if self._status is None:
                code = error.code()
                if code not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED):
                    code = grpc.StatusCode.UNAVAILABLE
                self._lane.say(self.number, _CANCEL)
                # Our text comes first: gRPC's alone would look like a call that was never begun, and be retried.
                self.end(code, f"a large message of {self._method.path[1:]} could not be fetched: {error.details()}")
            raise

    def _decoded(self, raw: Any) -> Any:
        """A reply message. Raises ContentGone."""
        decode = self._method.response_deserializer
        message = raw if decode is None else decode(raw)
        return message if self._sharing is None else self._sharing.incoming(message)

    def _wake(self) -> None:
        if self._waiters:
            wake_all(self._waiters)

    def _change(self) -> asyncio.Future[None]:
        """A future for the next change: a message, headers, the end."""
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
        """Raise the error of a failed call."""
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


class Parcel(NamedTuple):
    """A message that the replica keeps until the caller fetches it outside the lane."""

    number: int


class UnaryUnaryLaneCall(LaneCall):
    """One request, one reply."""

    __slots__ = ("_fetching", "_reply")

    def __init__(
        self, lane: CallerLane, number: int, method: Method, timeout: float, sharing: Sharing | None = None
    ) -> None:
        super().__init__(lane, number, method, timeout, sharing)
        self._reply: bytes | None = None
        self._fetching: asyncio.Task[None] | None = None

    def finish(self, frame: Frame) -> None:
        """END came, with the reply of a successful call. A call with a large reply ends once the reply is fetched:
        until then its deadline holds, and it counts as in flight.
        """
        if not frame.parcel:
            self._reply = frame.message if frame.has_message else None
            super().finish(frame)
        elif self._fetching is None:
            if frame.metadata:  # kept even if the call ends before its reply is fetched
                self._lane.learn(unflatten(frame.metadata))
            # Owned by the call: it ends with it.
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(frame), name="large reply of a call")

    def end(self, status: grpc.StatusCode, details: str = "") -> None:
        """The call is over; a reply on its way is dropped."""
        super().end(status, details)
        if self._fetching is not None and self._fetching is not asyncio.current_task():
            self._fetching.cancel()

    async def _fetch(self, frame: Frame) -> None:
        try:
            self._reply = await self._fetched(frame.parcel)
        except grpc.aio.AioRpcError:
            return  # `_fetched` has ended the call with it
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
        return self._decoded(self._reply)


class UnaryStreamLaneCall(LaneCall):
    """One request, many replies: iterated over, or read."""

    __slots__ = ("_failure", "_inbox", "_sink", "_window")

    def __init__(
        self, lane: CallerLane, number: int, method: Method, timeout: float, sharing: Sharing | None = None
    ) -> None:
        super().__init__(lane, number, method, timeout, sharing)
        self._inbox: deque[tuple[bytes | Parcel, int]] = deque()
        self._window = ReceiveWindow(lane.window)
        self._sink: Callable[[list[Any]], bool] | None = None
        self._failure: Exception | None = None
        """The error of the sink; the next `read` raises it."""

    def message(self, item: bytes | Parcel, size: int) -> bool:
        """A message came."""
        inbox = self._inbox
        inbox.append((item, size))
        if self._sink is None:
            self._wake()
        elif len(inbox) == 1:
            self._lane.pours.append(self)  # once all of the packet has arrived
        return self._window.arrive(size)

    def deliver(self, sink: Callable[[list[Any]], bool]) -> None:
        """Call `sink(messages)` with the messages that have arrived and, in the turn of the loop in which they arrive,
        with further ones, all of one packet at once: no task is woken. `sink` has to take all of them, and returns
        False to receive no more. Later messages are then read, as are large messages, which have to be fetched. `read`
        raises the end of the call, and what `sink` raises.
        """
        self._sink = sink
        if self._inbox:
            self.pour()

    def lend(self, fd: int | None) -> None:
        """Lend a client's connection to the replica, which expects it; None: none can be lent."""
        if process.MEMORY is not None and self._status is None and self._lane.link_setup is not None:
            with process.MEMORY.lock:
                self._lane.link_setup.link.lend(self.number, fd)

    def pour(self) -> None:
        """Pass the messages that have arrived to the sink."""
        sink = self._sink
        if sink is None:
            return
        more = False
        try:
            ready = self.read_ready()
            more = not ready or sink(ready)
        except asyncio.CancelledError as error:  # the lane itself was not cancelled
            self._failure = RuntimeError("the sink of a call's messages raised CancelledError")
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
        inbox, owed = self._inbox, 0
        while inbox and not isinstance(inbox[0][0], Parcel):
            item, size = inbox.popleft()
            owed += self._window.consume(size)
            ready.append(self._decoded(item))
        self._pay(owed)
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
        """Whether this side ended the call: the messages that have arrived are then dropped."""
        return self.by_itself or self._status is grpc.StatusCode.DEADLINE_EXCEEDED

    async def _take(self, item: bytes | Parcel, size: int) -> Any:
        if isinstance(item, Parcel):
            try:
                item = await self._fetched(item.number)
            except grpc.aio.AioRpcError:
                self._raise()
                raise
        self._pay(self._window.consume(size))
        return self._decoded(item)

    def _pay(self, credit: int) -> None:
        if credit and self._status is None:
            self._lane.say(self.number, _CREDIT, credit=credit)
