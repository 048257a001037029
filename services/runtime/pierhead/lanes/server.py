"""The replica's side of lanes: a `ServedLane` per caller, on the port of plain gRPC services and at a Unix socket."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc

from pierhead.deadlines import Deadlines
from pierhead.edge.edge import UNMATCHED, Edge
from pierhead.edge.methods import Context, ServedMethod
from pierhead.edge.unix_sockets import bound
from pierhead.errors import REFUSED_KEY, Backpressure
from pierhead.held import MODELS_KEY
from pierhead.lane.v1.lane_pb2 import (
    Accompanied,
    Frame,
    Goodbye,
    Hello,
    LaneName,
    MemoryQuestion,
    MemorySocket,
    Packet,
    Parcel,
    ParcelName,
)
from pierhead.lanes.metadata import Pair, flatten, size_of
from pierhead.lanes.outbox import Outbox
from pierhead.lanes.packet_socket import PacketSocket
from pierhead.lanes.protocol import HELLO_TIMEOUT_S, MAX_PACKET_BYTES, LaneBrokenError, Stream, parse_packet
from pierhead.lanes.served import ServedCall
from pierhead.lanes.window import LARGE_BYTES, WINDOW_BYTES
from pierhead.memory import process
from pierhead.routing_stats import STATS_KEY
from pierhead.tasks import end_tasks, next_change, wake, wake_all

logger = logging.getLogger("pierhead")

SERVICE = "pierhead.lane.v1.Lane"

GOODBYE_S = 1.0
"""How long a lane may take to send its last packet when the replica closes."""

BACKLOG = 1024
"""Connections that wait to be accepted: all callers connect at once to a replica that has hung for a while."""

MAX_METHODS = 4096
"""Most methods that one lane may name: far more than any service has."""

_BEGIN = Frame.BEGIN
_CANCEL = Frame.CANCEL
_CREDIT = Frame.CREDIT
_END = Frame.END


class Lanes:
    """Every lane of one replica, and the gRPC service that they are opened through."""

    def __init__(self, methods: Iterable[ServedMethod], edge: Edge) -> None:
        self._methods = by_path(methods)
        self._edge = edge
        self._lanes: dict[bytes, ServedLane] = {}
        self._listener: asyncio.Server | None = None
        self._socket_tasks: set[asyncio.Task[None]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve lanes on `server`."""
        handlers: dict[str, Any] = {
            "Open": grpc.stream_stream_rpc_method_handler(self._open),
            "FindMemory": grpc.unary_unary_rpc_method_handler(
                _find_memory, MemoryQuestion.FromString, MemorySocket.SerializeToString
            ),
            "Accompany": grpc.unary_stream_rpc_method_handler(
                self._accompany, LaneName.FromString, Accompanied.SerializeToString
            ),
            "Take": grpc.unary_unary_rpc_method_handler(self._take, ParcelName.FromString, Parcel.SerializeToString),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def listen_at(self, path: str) -> None:
        """Serve lanes at a Unix socket as well. Raises SettingsError."""
        accept = functools.partial(PacketSocket, functools.partial(self._accept, f"unix:{path}"))
        self._listener = await asyncio.get_running_loop().create_unix_server(accept, sock=bound(path), backlog=BACKLOG)

    async def close(self) -> None:
        """Send goodbye on every lane: callers then know which of their calls were not accepted."""
        if self._listener is not None:
            self._listener.close()
        if self._lanes:
            await asyncio.wait([asyncio.ensure_future(lane.say_goodbye()) for lane in self._lanes.values()])
        if self._socket_tasks:
            await asyncio.wait(self._socket_tasks, timeout=2 * GOODBYE_S)
            await end_tasks(*self._socket_tasks)

    def _accept(self, peer: str, stream: PacketSocket) -> None:
        task = asyncio.get_running_loop().create_task(self._serve_socket(stream, peer), name="lane at a socket")
        self._socket_tasks.add(task)
        task.add_done_callback(self._socket_tasks.discard)

    async def _serve_socket(self, stream: PacketSocket, peer: str) -> None:
        try:
            await self._serve(stream, peer)
            await stream.finish(GOODBYE_S)
        except LaneBrokenError:
            return  # it is logged, and the caller sees the end
        except Exception:
            logger.exception("internal: the lane of %s ended through a bug in the runtime", peer)
        finally:
            stream.cancel()

    async def _accompany(self, name: LaneName, context: Context) -> AsyncIterator[Accompanied]:
        lane = self._lanes.get(name.lane)
        if lane is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no lane of this name")
        lane.is_accompanied = True
        try:
            yield Accompanied()
            await asyncio.wait([lane.ending])
        finally:  # cancelled: the caller hangs, or is gone
            wake(lane.ending)

    async def _open(self, _: object, context: Context) -> None:
        try:
            await self._serve(context, context.peer())
        except LaneBrokenError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"lane: {error}")

    async def _serve(self, stream: Stream, peer: str) -> None:
        """One lane from its hello to its end. Raises LaneBrokenError, which is logged."""
        lane = ServedLane(self._methods, self._edge, peer, self._may_wait)
        token = b""
        company: asyncio.TimerHandle | None = None
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await lane.read_hello(stream)
            token = lane.token = bytes(first.hello.lane)
            self._name(token, lane)
            if isinstance(stream, PacketSocket):
                company = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, lane.end_unless_accompanied)
            await lane.run(stream, first)
        except LaneBrokenError as error:
            logger.error("lane of %s is broken and closed: %s", peer, error)  # noqa: TRY400 - not our mistake
            raise
        except (TimeoutError, ConnectionError) as error:
            logger.debug("lane of %s ended before it was open: %r", peer, error)
        finally:
            if company is not None:
                company.cancel()
            if self._lanes.get(token) is lane:
                del self._lanes[token]
            lane.close()

    def _name(self, token: bytes, lane: ServedLane) -> None:
        if token in self._lanes:
            raise LaneBrokenError("another lane has the same name")
        self._lanes[token] = lane

    def _may_wait(self, lane: ServedLane) -> bool:
        """Whether a patient call of `lane` may queue here: while its caller has less than its share of the places.

        A caller sees first when its own calls end, and refills those places at once. A caller without a place would
        find one free only by luck. Its patient calls queue here up to its share instead, so that the wait of a call
        depends on the calls before it at its caller.
        """
        admission = self._edge.admission
        held = [len(each.calls) for each in self._lanes.values() if each.calls or each is lane]
        callers = len(held)
        if sum(held) - admission.waiting < admission.ongoing:
            callers += 1  # those without lanes
        # Without a call in flight nothing would move the line.
        return admission.ongoing > 0 and len(lane.calls) < max(1, admission.max_ongoing_requests // callers)

    async def _take(self, name: ParcelName, context: Context) -> Parcel:
        lane = self._lanes.get(name.lane)
        kept = None if lane is None else lane.let_go((name.call, name.parcel))
        if kept is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"parcel {name.parcel}: it was fetched, or its call ended")
        return Parcel(name=name, message=kept)


class ServedLane:
    """One caller's lane. Its calls end with it."""

    largest_packet = MAX_PACKET_BYTES
    token = b""
    """The lane's name, and that of the link by which the two processes share memory."""
    large = LARGE_BYTES
    """Replies with more bytes than this are fetched outside the lane."""

    def __init__(
        self,
        methods: Mapping[str, ServedMethod],
        edge: Edge,
        peer: str,
        may_wait: Callable[[ServedLane], bool] = lambda _: False,
    ) -> None:
        self.edge = edge
        self.peer = peer
        self.peer_window = 0
        self.outbox = Outbox()
        self.deadlines = Deadlines.current()
        self._served = methods
        self._methods: list[ServedMethod | str] = []
        """Methods by their numbers on this lane, from 1 on; a name where there is no such method."""
        self._may_wait = may_wait
        self.calls: dict[int, ServedCall] = {}
        """Calls in flight, or waiting for a place."""
        self._last = 0
        self._sent_models = 0
        """The version of the held models that was last sent to the caller."""
        self._sent_stats = 0
        """Likewise of the numbers that the service publishes."""
        self._kept: dict[tuple[int, int], bytes] = {}
        """Replies that wait to be fetched, by call and parcel."""
        self._fetched: list[asyncio.Future[None]] = []
        """The end of the lane, while it waits until all large replies were fetched."""
        self._leaving = False
        self.ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the lane is to end, and when it has ended."""
        self.is_accompanied = False
        """Whether its caller has begun the call that ends with the lane."""

    # ---- its life

    async def read_hello(self, stream: Stream) -> Packet:
        """The caller's first packet, whose hello names the lane. Raises LaneBrokenError, ConnectionError."""
        raw = await stream.read()
        if raw is grpc.aio.EOF:
            raise ConnectionResetError("it ended before the caller's hello")
        packet = parse_packet(raw, self.largest_packet)
        if not packet.HasField("hello") or not packet.hello.lane or not packet.hello.window:
            raise LaneBrokenError("the caller's first packet holds no hello")
        return packet

    async def run(self, stream: Stream, first: Packet) -> None:
        """Answer the caller's hello, and serve until the caller goes, or until goodbye. Raises LaneBrokenError."""
        self.peer_window = first.hello.window
        await stream.write(Packet(hello=Hello(window=WINDOW_BYTES)).SerializeToString())
        self._receive_frames(first)
        await self.serve(stream)

    async def serve(self, stream: Stream) -> None:
        """The same, after the hellos."""
        loop = asyncio.get_running_loop()
        # Owned by this coroutine: all end in the `finally` below.
        reader = loop.create_task(self._read_all(stream), name="lane reader")
        writer = loop.create_task(self.outbox.write_all(stream.write), name="lane writer")
        try:
            await asyncio.wait([reader, writer, self.ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(reader, writer)
            self.outbox.discard()
            errors = [task.exception() for task in (reader, writer) if not task.cancelled()]
        for error in errors:
            if isinstance(error, LaneBrokenError):
                raise error
            if error is not None:  # a failed stream: the caller has gone
                logger.debug("lane of %s: %r", self.peer, error)

    async def say_goodbye(self) -> None:
        """Send the caller the number of the last call that was begun here, and end the lane."""
        self._leaving = True
        self.outbox.packet().goodbye.CopyFrom(Goodbye(last_call=self._last))
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.outbox.drained()
                while self._kept:
                    await next_change(self._fetched)
        except TimeoutError:
            logger.warning("the caller %s no longer reads its lane; closed with unsent data", self.peer)
        wake(self.ending)

    def end_unless_accompanied(self) -> None:
        """End a lane at a socket whose caller has hung between its hello and the call."""
        if not self.is_accompanied:
            wake(self.ending)

    def close(self) -> None:
        """The stream is over: cancel its calls."""
        wake(self.ending)
        for call in list(self.calls.values()):
            call.cancel()
        self._kept.clear()

    # ---- for its calls

    @property
    def load(self) -> int:
        """`ongoing_plus_one` of END: the calls in flight here without the one that ends, plus one.

        A place that is passed on to a waiting call counts as free, too: the caller then sends its next call, which may
        queue.
        """
        return self.edge.admission.ongoing

    def trailers(self, own: Sequence[Pair]) -> Sequence[str]:
        """A call's trailing metadata, with models and numbers that have changed. Raises ValueError if too large."""
        held, stats, _ = self.edge.reports
        if held.version != self._sent_models:
            own = (*own, (MODELS_KEY, held.text))
        if stats.version != self._sent_stats:
            own = (*own, (STATS_KEY, stats.text))
        flat = flatten(own) if own else ()
        self._sent_models, self._sent_stats = held.version, stats.version
        return flat

    def ended(self, call: ServedCall, placed: bool) -> None:
        """A call is over, however it ended; `placed`: it had a place, and was not waiting for one."""
        self.calls.pop(call.number, None)
        if placed:
            self.edge.admission.leave()

    def refuse(
        self, number: int, status: grpc.StatusCode, details: str, trailers: Sequence[Pair], ongoing_plus_one: int
    ) -> None:
        """End a call with a status and no message."""
        metadata = self.trailers(trailers)
        self.outbox.frames(len(details) + size_of(metadata)).add(
            call=number, kind=_END, status=status.value[0], details=details, metadata=metadata,
            ongoing_plus_one=ongoing_plus_one,
        )  # fmt: skip

    def keep(self, call: ServedCall, raw: bytes) -> int:
        """Keep a large reply until it is fetched, at most until the call's deadline; returns its number."""
        call.parcels += 1
        key = (call.number, call.parcels)
        self._kept[key] = raw
        self.deadlines.add(call.until, lambda: self.let_go(key))
        return call.parcels

    def let_go(self, key: tuple[int, int]) -> bytes | None:
        """Stop keeping a large reply; returns it, or None if it was not kept."""
        found = self._kept.pop(key, None)
        wake_all(self._fetched)
        return found

    # ---- frames from the caller

    async def _read_all(self, stream: Stream) -> None:
        while (raw := await stream.read()) is not grpc.aio.EOF:
            await self.outbox.room()  # read no more from a caller that does not read its replies
            packet = parse_packet(raw, self.largest_packet)
            if packet.HasField("hello"):
                raise LaneBrokenError("a second hello")
            self._receive_frames(packet)

    def _receive_frames(self, packet: Packet) -> None:
        known = self.calls
        try:
            for frame in packet.frames:
                if frame.kind == _BEGIN:
                    self._begin(frame)
                    continue
                call = known.get(frame.call)
                if frame.kind == _CANCEL and self._kept:  # also of a call that has ended, whose reply is large
                    for key in [key for key in self._kept if key[0] == frame.call]:
                        self.let_go(key)
                if call is not None:
                    self._pass_on(call, frame)
                elif not 0 < frame.call <= self._last:
                    raise LaneBrokenError(f"a frame for call {frame.call}; the last one begun is {self._last}")
        except ValueError as error:
            raise LaneBrokenError(str(error)) from error

    def _begin(self, frame: Frame) -> None:
        number = frame.call
        if number <= self._last:
            raise LaneBrokenError(f"call {number} begins after call {self._last}")
        self._last = number
        if self._leaving:  # the goodbye says that it was not accepted: the caller may send it elsewhere
            return
        method = self._method(frame)
        edge = self.edge
        refusal = edge.admission.enter()
        if refusal is not None and (
            isinstance(method, str)
            or not (frame.patient and isinstance(refusal, Backpressure) and self._may_wait(self))
        ):
            reason = edge.refused(refusal)
            name = UNMATCHED if isinstance(method, str) else method.name  # callers can invent names: not as labels
            edge.metrics.requests.inc((name, refusal.grpc_status.name))
            trailers = (*refusal.trailing_metadata(), (REFUSED_KEY, reason))
            self.refuse(number, refusal.grpc_status, refusal.details(), trailers, edge.admission.ongoing + 1)
            return
        if isinstance(method, str):
            edge.admission.leave()
            self.refuse(number, grpc.StatusCode.UNIMPLEMENTED, "Method not found!", (), edge.admission.ongoing + 1)
            return
        try:
            call = ServedCall(self, frame, method)
        except BaseException:
            if refusal is None:
                edge.admission.leave()
            raise
        self.calls[number] = call
        if refusal is None:
            call.start(frame.message)
        else:
            call.wait(frame.message)

    def _method(self, frame: Frame) -> ServedMethod | str:
        """The method that a BEGIN names; only the name if there is no such method."""
        if frame.path:
            if frame.method != len(self._methods) + 1 or len(self._methods) >= MAX_METHODS:
                raise LaneBrokenError(f"method {frame.method} is named after {len(self._methods)} others")
            self._methods.append(self._served.get(frame.path, frame.path[1:]))
        if not 0 < frame.method <= len(self._methods):
            raise LaneBrokenError(f"method {frame.method} was never named")
        return self._methods[frame.method - 1]

    def _pass_on(self, call: ServedCall, frame: Frame) -> None:
        if frame.kind == _CANCEL:
            call.cancel()
        elif frame.kind == _CREDIT:
            call.credit(frame.bytes)
        else:
            raise LaneBrokenError(f"a frame of kind {frame.kind}, which callers do not send")


async def _find_memory(_: MemoryQuestion, context: Context) -> MemorySocket:
    memory = process.MEMORY
    if memory is None or memory.invite is None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this replica shares no memory")
    return MemorySocket(name=memory.invite())


def by_path(methods: Iterable[ServedMethod]) -> dict[str, ServedMethod]:
    """The methods that lanes carry, by "/package.Service/Method": streams of requests come over plain gRPC."""
    return {f"/{method.name}": method for method in methods if not method.request_streaming}
