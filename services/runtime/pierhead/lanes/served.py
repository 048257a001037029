"""One call of a lane at the replica: it is the service's context, runs the method and sends the replies."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from pierhead.edge.edge import too_long
from pierhead.edge.methods import status_of
from pierhead.errors import MAX_DETAILS, clip
from pierhead.lane.v1.lane_pb2 import Frame
from pierhead.lanes.metadata import Pair, flatten, size_of, unflatten
from pierhead.lanes.window import SendWindow
from pierhead.memory import process
from pierhead.memory.scope import SCOPE
from pierhead.memory.sharing import Sharing, around, serving
from pierhead.raised import is_answerable
from pierhead.request import (
    CURRENT,
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    InsideRequest,
    RequestContext,
    accept_id,
    from_metadata,
    traced,
)
from pierhead.tasks import next_change, wake_all

if TYPE_CHECKING:
    from pierhead.edge.methods import ServedMethod
    from pierhead.lanes.server import ServedLane
    from pierhead.memory.lending import BorrowedConnection
    from pierhead.trace import RequestTrace

_MESSAGE = Frame.MESSAGE
_HEADERS = Frame.HEADERS
_END = Frame.END
BURST = 64
"""Messages of one stream that are sent in one turn of the loop, at most."""

_OK = grpc.StatusCode.OK.value[0]


class ServedCall(grpc.aio.ServicerContext):  # type: ignore[type-arg]
    """A call that was admitted, or waits to be, from BEGIN to END. It is the context that the service's method gets."""

    def __init__(self, lane: ServedLane, frame: Frame, method: ServedMethod) -> None:
        self.task: asyncio.Task[None]
        self.method = method
        if process.MEMORY is not None:
            self._sharing = serving(lane.token, many_in=False, many_out=method.response_streaming)
            self.method = around(self._sharing, method)
        self.number = frame.call
        self._lane = lane
        self._request_id = accept_id(frame.request_id)
        self._traceparent = frame.traceparent
        self._metadata = unflatten(frame.metadata)
        self._started = now = time.monotonic()
        longest = lane.edge.settings.request_timeout_s
        self._callers_deadline = 0 < frame.timeout_us <= longest * 1e6
        """Whether its deadline is the caller's, and not the service's own."""
        self.until = now + (frame.timeout_us / 1e6 if self._callers_deadline else longest)
        """Its deadline, in `time.monotonic()` seconds."""
        self._deadline = lane.deadlines.add(self.until, self._expire)
        if method.response_streaming:
            self._room = SendWindow(lane.peer_window)

    # Class attributes: few calls change them, so creating a call need not set them.
    _sharing: Sharing | None = None
    _trace: RequestTrace | None = None
    _code: Any = None
    _details = ""
    _headers_sent = False
    _trailers: Sequence[Pair] = ()
    _callbacks: tuple[Callable[[Any], object], ...] = ()
    parcels = 0
    """Large replies that the lane has kept for it."""
    _begun = False
    _ended = False
    _cancelled = False
    _late = False
    _room: SendWindow | None = None
    """Of a stream of replies: what the caller takes."""
    _writers: list[asyncio.Future[None]] | None = None
    """Futures of the tasks that wait to write; nearly always one."""
    _begin: Callable[[], None] | None = None
    """While it waits for a place: the function that begins it."""

    # ---- the work

    def start(self, raw: bytes) -> None:
        """Begin the work; from Python 3.12 on, it runs at once up to its first wait."""
        loop = asyncio.get_running_loop()
        if sys.version_info >= (3, 12):
            self.task = asyncio.Task(self.run(raw), loop=loop, eager_start=True)
        else:
            self.task = loop.create_task(self.run(raw))

    def wait(self, raw: bytes) -> None:
        """Begin the work once there is a place."""
        context = contextvars.copy_context()  # `begin` runs in the context of the call whose end frees the place

        def begin() -> None:
            self._begin = None
            self._started = time.monotonic()
            # Not eagerly: this runs within the end of another call.
            self.task = asyncio.get_running_loop().create_task(self.run(raw), context=context)

        self._begin = begin
        self._lane.edge.admission.wait(begin)

    async def run(self, raw: bytes) -> None:
        """Work on the call and answer it, in the call's own task."""
        self._begun = True
        self.task = asyncio.current_task()  # type: ignore[assignment]  # this one; an eager start comes before the name
        method = self.method
        begin = self._lane.edge.begin_trace
        if self._metadata:
            request: RequestContext = from_metadata(self.invocation_metadata(), self.until, begin, InsideRequest)
        else:
            given, trace = traced(self._traceparent or None, begin)
            request = InsideRequest(self._request_id, self.until, given, None, None, trace)
        self._trace = request.trace
        CURRENT.set(request)
        if self._sharing is not None:
            SCOPE.set(self._sharing.scope)
        code = "OK"
        try:
            request = method.decode(raw)
            if method.response_streaming:
                await self._stream(method.behaviour(request, self))
                self._end_well(None)
            else:
                self._end_well(method.encode(await method.behaviour(request, self)))
            if self._code:
                code = status_of(self._code).name
        except BaseException as error:
            code = self._end_ill(error)
            if not (is_answerable(error) or (self._late and isinstance(error, asyncio.CancelledError))):
                raise
        finally:
            self._finished(code)

    def cancel(self) -> None:
        """Stop the work: its caller no longer waits for it."""
        if self._begin is not None:
            self._lane.edge.admission.stop_waiting(self._begin)
            self._begin = None
            code = self._end_ill(asyncio.CancelledError()) if self._late else grpc.StatusCode.CANCELLED.name
            self._finished(code, placed=False)
            return
        if self._cancelled:  # a second cancellation would end the wait for its thread, or what cleans up
            return
        self._cancelled = True
        self.task.cancel()
        if not self._begun:  # and never will: a task that is cancelled before its first step runs no line
            self._begun = True
            self._finished(grpc.StatusCode.CANCELLED.name)

    def _finished(self, code: str, *, placed: bool = True) -> None:
        self._ended = True
        if self._writers:  # tasks of the service that outlive the call: nothing else would wake them
            wake_all(self._writers)
        self._deadline.cancel()
        if self._sharing is not None:
            self._sharing.end()
        self._lane.ended(self, placed)
        seconds = time.monotonic() - self._started
        self._lane.edge.finished(self.method.name, code, seconds, self._request_id, self._trace)
        for callback in self._callbacks:
            callback(self)

    async def _stream(self, running: Any) -> None:
        """Send the replies of a streaming method: it is an async generator, or a coroutine that calls `write`."""
        if not inspect.isasyncgen(running):
            await running
            return
        room, burst = self._room, 0
        try:
            async for message in running:
                burst += 1
                if burst % BURST == 0:
                    await asyncio.sleep(0)  # a generator that never waits must not keep the loop to itself
                if room is not None and room.open:
                    self._send(message, room)
                else:
                    await self.write(message)
        finally:
            await running.aclose()  # a cancelled stream ends its generator now, not at garbage collection

    def _end_well(self, reply: bytes | None) -> None:
        lane = self._lane
        status = status_of(self._code).value[0] if self._code else _OK
        details, trailers = self._details, lane.trailers(self._trailers)
        size = len(details) + size_of(trailers)
        if reply is None or status != _OK:
            lane.outbox.frames(size, paced=reply is None).add(
                call=self.number,
                kind=_END,
                status=status,
                details=details,
                metadata=trailers,
                ongoing_plus_one=lane.load,
            )
        elif len(reply) <= lane.large:
            lane.outbox.frames(size + len(reply)).add(
                call=self.number, kind=_END, message=reply, has_message=True, details=details, metadata=trailers,
                ongoing_plus_one=lane.load,
            )  # fmt: skip
        else:
            lane.outbox.frames(size).add(
                call=self.number, kind=_END, has_message=True, parcel=lane.keep(self, reply), bytes=len(reply),
                details=details, metadata=trailers, ongoing_plus_one=lane.load,
            )  # fmt: skip

    def _end_ill(self, error: BaseException) -> str:
        """Answer with a status, unless the caller has gone; returns its name."""
        try:
            return self._answer(error)
        except Exception as unsendable:  # such as bad metadata of the service's own error class
            self._trailers = ()
            return self._answer(unsendable)

    def _answer(self, error: BaseException) -> str:
        """As `_end_ill`, but raises for a status that cannot be sent."""
        if isinstance(error, grpc.aio.AbortError) and self._code is not None:
            status = status_of(self._code)
            self._lane.refuse(self.number, status, self._details, self._trailers, self._lane.load)
            return status.name
        if self._late and isinstance(error, asyncio.CancelledError):
            if self._callers_deadline:  # the caller has already ended the call by its own clock
                return grpc.StatusCode.DEADLINE_EXCEEDED.name
            error = too_long(self.method.name, self._lane.edge.settings)
        elif not is_answerable(error):
            return grpc.StatusCode.CANCELLED.name
        answer = self._lane.edge.error_for(error, self.method.name)
        trailers = (*self._trailers, *answer.trailing_metadata())
        self._lane.refuse(self.number, answer.grpc_status, answer.details(), trailers, self._lane.load)
        return answer.grpc_status.name

    def _expire(self) -> None:
        self._late = True
        self.cancel()

    # ---- sending and receiving

    def credit(self, count: int) -> None:
        """The caller's consumer took replies."""
        if self._room is not None:
            self._room.earn(count)
            wake_all(self._writers or [])

    def borrow(self) -> BorrowedConnection | None:
        """The connection of the caller's own client, which the caller has to lend or to refuse after the first reply;
        None if the two processes share no memory.
        """
        if process.MEMORY is None:
            return None
        with process.MEMORY.lock:
            link = process.MEMORY.links.get(self._lane.token)
            return None if link is None else link.borrow(self.number)

    async def write(self, message: Any) -> None:
        """Send a reply message, when the caller takes it."""
        if self._room is None:
            raise grpc.aio.UsageError(f"{self.method.name} has one reply; return it")
        while not (self._ended or self._room.open):
            self._writers = self._writers or []
            await next_change(self._writers)
        if self._ended:
            raise asyncio.InvalidStateError("the call has ended: no message can follow")
        self._send(message, self._room)

    def _send(self, message: Any, room: SendWindow) -> None:
        raw = self.method.encode(message)
        size = len(raw)
        shared = 0 if self._sharing is None else self._sharing.weight
        lane = self._lane
        lane.edge.moved += 1
        room.spend(size + shared)
        if size > lane.large:
            lane.outbox.frames(paced=True).add(
                call=self.number, kind=_MESSAGE, has_message=True, parcel=lane.keep(self, raw), bytes=size + shared
            )
        elif shared:
            lane.outbox.frames(size, paced=True).add(
                call=self.number, kind=_MESSAGE, message=raw, has_message=True, bytes=size + shared
            )
        else:
            lane.outbox.frames(size, paced=True).add(call=self.number, kind=_MESSAGE, message=raw, has_message=True)

    async def read(self) -> Any:
        """The next request message, or `grpc.aio.EOF`."""
        raise grpc.aio.UsageError(f"{self.method.name} has one request; it was passed as the argument")

    # ---- the rest of grpc.aio.ServicerContext

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[Pair] | Mapping[str, Any] = ()
    ) -> NoReturn:
        """End the call with a status. Raises AbortError, which must not be caught."""
        if code is grpc.StatusCode.OK:
            raise ValueError("abort: OK is no status to abort with")
        self._code = code
        self.set_details(details)
        if trailing_metadata:
            self._trailers = _pairs(trailing_metadata)
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status object."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    async def send_initial_metadata(self, initial_metadata: Iterable[Pair] | Mapping[str, Any]) -> None:
        """Send metadata ahead of the first message; once."""
        if self._headers_sent:
            raise asyncio.InvalidStateError("initial metadata was sent before")
        self._headers_sent = True
        headers = flatten(_pairs(initial_metadata))
        self._lane.outbox.frames(size_of(headers)).add(call=self.number, kind=_HEADERS, metadata=headers)

    def set_trailing_metadata(self, trailing_metadata: Iterable[Pair] | Mapping[str, Any]) -> None:
        """Set the metadata to send with the status."""
        self._trailers = _pairs(trailing_metadata)

    def trailing_metadata(self) -> Sequence[Pair]:  # type: ignore[override]  # any pairs do, as gRPC's own has it
        """The metadata that was set."""
        return self._trailers

    def invocation_metadata(self) -> tuple[Pair, ...]:  # type: ignore[override]
        """The caller's metadata."""
        own: tuple[Pair, ...] = ((REQUEST_ID_KEY, self._request_id),)
        if self._traceparent:
            own = (*own, (TRACEPARENT_KEY, self._traceparent))
        return (*own, *self._metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        """The status to end with."""
        self._code = code

    def code(self) -> Any:
        """The status that was set."""
        return self._code or 0

    def set_details(self, details: str) -> None:
        """Set the message to end with; cut to fit a header. Raises TypeError for anything but text, as gRPC does."""
        if details is not None and not isinstance(details, str):
            raise TypeError(f"details: expected str, found {type(details).__name__}: {details!r}")
        self._details = clip(details, MAX_DETAILS) if details else ""

    def details(self) -> str:
        """The message that was set."""
        return self._details

    def time_remaining(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.until - time.monotonic())

    def peer(self) -> str:
        """The caller's address, as gRPC writes it."""
        return self._lane.peer

    def peer_identities(self) -> None:
        """None: connections are plain text within the stack."""

    def peer_identity_key(self) -> None:
        """None."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Empty."""
        return {}

    def set_compression(self, compression: grpc.Compression) -> None:
        """Does nothing: calls that ask for compression go over plain gRPC."""

    def disable_next_message_compression(self) -> None:
        """Nothing."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(context)` at the end."""
        self._callbacks = (*self._callbacks, callback)

    def cancelled(self) -> bool:
        """Whether the caller or its deadline ended it."""
        return self.task.cancelling() > 0

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended


def _pairs(metadata: Iterable[Pair] | Mapping[str, Any]) -> tuple[Pair, ...]:
    pairs = tuple(metadata.items() if isinstance(metadata, Mapping) else metadata)
    flatten(pairs)  # so that invalid metadata raises in the code that sets it
    return pairs
