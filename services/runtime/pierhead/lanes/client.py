"""The caller's side of lanes: one connection to one replica, over a lane whenever the replica has lanes.

connecting --(hellos exchanged)--> ready --(stream lost, goodbye, rule broken)--> connecting, after a pause
    |                                ^
    `--(UNIMPLEMENTED: the replica has no lanes)--> plain gRPC, until that connection breaks
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from random import random
from typing import Any

import grpc

from pierhead.deadlines import Deadlines
from pierhead.held import MODELS_KEY
from pierhead.lane.v1.lane_pb2 import Frame, Hello, LaneName, Packet, ParcelName
from pierhead.lane.v1.lane_pb2_grpc import LaneStub
from pierhead.lanes import lane_calls as calls
from pierhead.lanes.connection import (
    CHANNEL_OPTIONS,
    FOREIGN_CHANNEL_OPTIONS,
    NEVER_SENT,
    Connection,
    GrpcConnection,
    Method,
    MethodKind,
    sharing_of,
)
from pierhead.lanes.lane_calls import LaneCall
from pierhead.lanes.metadata import Pair, flatten, size_of, text_of, unflatten
from pierhead.lanes.outbox import Outbox
from pierhead.lanes.packet_socket import PacketSocket, connect
from pierhead.lanes.protocol import HELLO_TIMEOUT_S, MAX_PACKET_BYTES, LaneBrokenError, parse_packet
from pierhead.lanes.window import LARGE_BYTES, WINDOW_BYTES
from pierhead.memory import process
from pierhead.memory.link import Link
from pierhead.memory.link_setup import LinkSetup, meet
from pierhead.memory.sharing import Sharing
from pierhead.request import REQUEST_ID_KEY, TRACEPARENT_KEY
from pierhead.routing_stats import STATS_KEY
from pierhead.tasks import end_tasks

logger = logging.getLogger("pierhead")

OPEN = "/pierhead.lane.v1.Lane/Open"

RECONNECT_S = (0.1, 2.0)
"""Shortest and longest backoff before a lost lane is opened again; doubled at each failure, jittered."""

CALLER_QUEUE_BYTES = 64 * 1024 * 1024
"""While more bytes than this wait to be sent to a replica, no call is begun there: it counts as not connected."""

PARCEL_TIMEOUT_S = 60.0
"""Longest time for sending or fetching one large message; the call's own deadline may end it earlier."""

_BEGIN = Frame.BEGIN
_MESSAGE = Frame.MESSAGE
_HEADERS = Frame.HEADERS
_END = Frame.END

_CALLS: dict[MethodKind, Callable[..., Any]] = {
    MethodKind.UNARY_UNARY: calls.UnaryUnaryLaneCall,
    MethodKind.UNARY_STREAM: calls.UnaryStreamLaneCall,
}


class LaneConnection:
    """A `Connection` whose calls share one stream. Falls back to plain gRPC for a replica that has no lanes."""

    def __init__(self, address: str, changed: Callable[[], None], service: str = "") -> None:
        self.ready = False
        self._address = address
        self._service = service
        self._changed = changed
        self._lane: CallerLane | None = None
        self._plain: GrpcConnection | None = None
        self._plain_changed = asyncio.Event()
        self._grpc: GrpcConnection | None = None
        """For streams of requests and large messages, whose bytes must not delay other calls; made on first use."""
        self._encoded_methods: dict[Method, Method] = {}
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name=f"lane {address}")

    def open(
        self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any, *, patient: bool = False
    ) -> Any:
        """Begin a call; see Connection."""
        if self._plain is not None:
            return self._plain.open(method, request, timeout, metadata, compression)
        if method.request_streaming:
            return self.grpc_connection().open(method, request, timeout, metadata, compression)
        lane = self._lane
        sharing = None
        if process.MEMORY is not None:
            sharing = sharing_of(self._link(), method, request)
            if sharing is not None:
                request = sharing.outgoing(request)
        encode = method.request_serializer
        raw = request if encode is None else encode(request)
        if len(raw) > LARGE_BYTES or compression is not None:
            connection, method = self.grpc_connection(), self._encoded(method)
            if sharing is not None:
                return connection.open_shared(sharing, method, raw, timeout, metadata, compression)
            return connection.open(method, raw, timeout, metadata, compression)
        if lane is not None and lane.outbox.queued < CALLER_QUEUE_BYTES:
            return lane.begin(method, raw, timeout, metadata, patient, sharing)
        return self._never_sent(method)

    def _encoded(self, method: Method) -> Method:
        """The same method for a request that is encoded already."""
        found = self._encoded_methods.get(method)
        if found is None:
            found = Method(method.kind, method.path, None, method.response_deserializer, method.registered)
            self._encoded_methods[method] = found
        return found

    def check(self) -> None:
        """Does nothing: a lane notices at once that it is lost."""

    def grpc_connection(self) -> GrpcConnection:
        """The connection for streams of requests and for large messages."""
        if self._grpc is None:
            self._grpc = GrpcConnection(self._address, lambda: None, link=self._link)
        return self._grpc

    def _link(self) -> Link | None:
        """The link to the process at the other end of the lane."""
        lane = self._lane
        return None if lane is None or lane.link_setup is None else lane.link_setup.link

    async def close(self) -> None:
        """End the lane and the other connections; calls fail."""
        await end_tasks(self._keeper)
        for connection in (self._plain, self._grpc):
            if connection is not None:
                await connection.close()
        await self._channel.close()

    def _never_sent(self, method: Method) -> Any:
        """A call that has ended already, because there is no lane to send it by."""
        nowhere = CallerLane(self.grpc_connection)
        call = nowhere.begin(method, b"", 0.0, ())
        nowhere.lost(f"there is no lane to {self._address} now")
        return call

    # ---- keeping a lane open

    async def _keep(self) -> None:
        shortest, longest = RECONNECT_S
        pause = shortest
        while True:
            lane, has_lanes = CallerLane(self.grpc_connection), True
            try:
                reason = await self._live(lane)
            except grpc.aio.AioRpcError as error:
                has_lanes = error.code() is not grpc.StatusCode.UNIMPLEMENTED
                reason = error.details() or error.code().name
            except OSError as error:
                reason = error.strerror or str(error)
            except LaneBrokenError as error:
                reason = f"broken: {error}"
                logger.error("the lane to %s is %s; it is opened again", self._address, reason)  # noqa: TRY400
            except Exception:
                logger.exception("internal: the lane to %s ended through a bug in the runtime", self._address)
                reason = "internal"
            finally:
                self._set(None)
                lane.lost(f"the lane to {self._address} was lost")
            if not has_lanes:  # only now: the error above holds the call, and the call its connection
                await self._live_without()
            if lane.was_open:
                pause = shortest
            logger.debug("lane to %s: %s", self._address, reason)
            await asyncio.sleep(pause * (0.5 + random()))  # noqa: S311 - jitter
            pause = min(longest, pause * 2)

    async def _live(self, lane: CallerLane) -> str:
        """One lane from its opening to its end; returns why it ended. Raises AioRpcError, OSError, LaneBrokenError."""
        socket = await self._connected()
        # No deadline: it lives as long as both sides do, and keep-alive notices a dead one.
        stream: Any = socket or self._channel.stream_stream(OPEN)(wait_for_ready=True)
        writer: asyncio.Task[None] | None = None
        companion: asyncio.Task[None] | None = None
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended already: `read` raises why
                await stream.write(Packet(hello=Hello(lane=lane.token, window=WINDOW_BYTES)).SerializeToString())
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                lane.hello(await stream.read())
                if socket is not None:
                    companion = await self._accompanied(lane, socket)
            # Owned by this coroutine: ends in the `finally` below.
            writer = asyncio.get_running_loop().create_task(_write(lane.outbox, stream), name="lane writer")
            writer.add_done_callback(lambda _: stream.cancel())
            lane.link_setup = meet(self._service, self._channel, lane.token)
            self._set(lane)
            while True:
                raw = await stream.read()
                if raw is grpc.aio.EOF:
                    return "the replica ended it"
                lane.receive(raw)
        except TimeoutError:
            return f"no hello within {HELLO_TIMEOUT_S:g} s"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "the replica cancelled it"  # gRPC raises the same for a stream that ends with that status
        finally:
            stream.cancel()
            if lane.link_setup is not None:
                lane.link_setup.end()
            started = [task for task in (writer, companion) if task is not None]
            if started:
                await end_tasks(*started)

    async def _connected(self) -> PacketSocket | None:
        """The socket of the replica's lanes; None where it has none. Raises OSError."""
        try:
            return await connect(self._address)
        except OSError:
            # An earlier replica of this name may have left one, while this one is reached by gRPC.
            if self._channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
                raise
            return None

    async def _accompanied(self, lane: CallerLane, socket: PacketSocket) -> asyncio.Task[None]:
        """Begin the call that notices a replica which hangs; return its task, which then ends the lane."""
        stub: Any = LaneStub(self._channel)
        call = stub.Accompany(LaneName(lane=lane.token), wait_for_ready=True)

        async def accompany() -> None:
            try:
                await call.read()  # ends with the lane, in order
            except grpc.aio.AioRpcError:
                socket.cancel()
            except asyncio.CancelledError:  # also where the call ends with the status CANCELLED
                socket.cancel()
                raise

        try:
            await call.read()
        except BaseException:
            call.cancel()
            raise
        return asyncio.get_running_loop().create_task(accompany(), name="lane companion")

    async def _live_without(self) -> None:
        """Use plain gRPC until that connection breaks: the next process at the address may have lanes."""
        await self._channel.close()  # it would continue to ping the server
        plain = self._plain = GrpcConnection(
            self._address, self._plain_changed.set, self._service, options=FOREIGN_CHANNEL_OPTIONS
        )
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                while not plain.ready:
                    await self._plain_change()
            while plain.ready:
                self._set_ready(True)
                await self._plain_change()
        except TimeoutError:
            return
        finally:
            self._plain = None
            self._set_ready(False)
            await plain.close()
            self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)

    async def _plain_change(self) -> None:
        self._plain_changed.clear()
        await self._plain_changed.wait()

    def _set(self, lane: CallerLane | None) -> None:
        self._lane = lane
        self._set_ready(lane is not None)

    def _set_ready(self, ready: bool) -> None:
        if ready is not self.ready:
            self.ready = ready
            self._changed()


async def _write(outbox: Outbox, stream: Any) -> None:
    try:
        await outbox.write_all(stream.write)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, ConnectionError):
        return  # reading says why
    except Exception:
        logger.exception("internal: a lane's packet could not be written")


class CallerLane:
    """One lane, from its hello to its loss, and the calls in it."""

    largest_packet = MAX_PACKET_BYTES

    def __init__(self, grpc_connection: Callable[[], GrpcConnection]) -> None:
        self.token = os.urandom(16)
        self.outbox = Outbox()
        self.window = WINDOW_BYTES
        self.was_open = False
        self.models: tuple[Pair, ...] = ()
        """The models that the replica last reported, as metadata that is added to every call's."""
        self.stats: tuple[Pair, ...] = ()
        """Likewise of the numbers that it publishes."""
        self.deadlines = Deadlines.current()
        self.pours: list[Any] = []
        """Calls with messages for their sinks, which receive them once the whole packet is read."""
        self.link_setup: LinkSetup | None = None
        self._grpc_connection = grpc_connection
        self._calls: dict[int, LaneCall] = {}
        self._methods: dict[Method, int] = {}
        self._taken_up: int | None = None
        """The last call that the replica accepted, by its goodbye."""

    # ---- calls

    def begin(
        self,
        method: Method,
        raw: bytes,
        timeout: float,
        metadata: Iterable[Pair],
        patient: bool = False,
        sharing: Sharing | None = None,
    ) -> Any:
        """A call with the request `raw`. Raises as `flatten` does."""
        request_id, traceparent, others, size = _split(metadata)
        number = self.outbox.latest + 1
        index = self._methods.get(method)
        path = ""
        if index is None:
            index = self._methods[method] = len(self._methods) + 1
            path = method.path
        call = self._calls[number] = _CALLS[method.kind](self, number, method, timeout, sharing)
        frames = self.outbox.frames(size + len(raw))  # this may close a packet, and the call is in the next one
        self.outbox.latest = number
        frame = frames.add(
            call=number, kind=_BEGIN, method=index, path=path, timeout_us=max(1, int(timeout * 1e6)),
            request_id=request_id, traceparent=traceparent, metadata=others, message=raw, has_message=True,
        )  # fmt: skip
        if patient:
            frame.patient = True
        return call

    def say(self, number: int, kind: Frame.Kind.ValueType, *, credit: int = 0) -> None:
        """Queue a frame without a message."""
        self.outbox.frames().add(call=number, kind=kind, bytes=credit)

    async def fetch(self, number: int, parcel: int, remaining: float) -> bytes:
        """Fetch a large message that the replica keeps. Raises AioRpcError."""
        name = ParcelName(lane=self.token, call=number, parcel=parcel)
        stub: Any = LaneStub(self._grpc_connection().channel)
        taken = await stub.Take(name, timeout=min(PARCEL_TIMEOUT_S, remaining))
        return bytes(taken.message)

    def learn(self, trailers: Iterable[Pair]) -> None:
        """Keep the models held and the numbers published, which a replica sends once per lane and after each change."""
        for key, value in trailers:
            if key == MODELS_KEY:
                self.models = ((key, value),)
            elif key == STATS_KEY:
                self.stats = ((key, value),)

    def forget(self, number: int) -> None:
        """The call has ended."""
        self._calls.pop(number, None)

    # ---- from the replica

    def hello(self, raw: Any) -> None:
        """Take in the replica's first packet. Raises LaneBrokenError, ConnectionError."""
        if raw is grpc.aio.EOF:
            raise ConnectionResetError("it ended before the replica's hello")
        packet = parse_packet(raw, self.largest_packet)
        if not packet.HasField("hello"):
            raise LaneBrokenError("the replica's first packet holds no hello")
        self.was_open = True
        self._receive_frames(packet)

    def receive(self, raw: bytes) -> None:
        """Take in a packet. Raises LaneBrokenError."""
        packet = parse_packet(raw, self.largest_packet)
        if packet.HasField("hello"):
            raise LaneBrokenError("a second hello")
        self._receive_frames(packet)
        if packet.HasField("goodbye"):
            self._taken_up = packet.goodbye.last_call

    def _receive_frames(self, packet: Packet) -> None:
        try:
            self._hand_out(packet)
        except ValueError as error:
            raise LaneBrokenError(str(error)) from error
        if self.pours:
            pours, self.pours = self.pours, []
            for each in pours:
                each.pour()

    def _hand_out(self, packet: Packet) -> None:
        known = self._calls
        for frame in packet.frames:
            call = known.get(frame.call)
            if call is None:
                if not 0 < frame.call <= self.outbox.latest:
                    raise LaneBrokenError(f"a frame for call {frame.call}; the last one begun is {self.outbox.latest}")
                if frame.kind == _END and frame.metadata:
                    self.learn(unflatten(frame.metadata))
                continue  # it crossed the call's end; its report on the replica is kept, as it is not sent again
            kind = frame.kind
            if kind == _END:
                call.finish(frame)
            elif kind == _MESSAGE:
                item = calls.Parcel(frame.parcel) if frame.parcel else frame.message
                if not call.message(item, frame.bytes or len(frame.message)):
                    raise LaneBrokenError(f"a message of call {frame.call} beyond its window, or not of its kind")
            elif kind == _HEADERS:
                call.headers(unflatten(frame.metadata))
            else:
                raise LaneBrokenError(f"a frame of kind {kind}, which replicas do not send")

    def lost(self, reason: str) -> None:
        """End every call: nothing arrives any more. The status of calls that the replica cannot have begun says so."""
        begun = self.outbox.sent if self._taken_up is None else min(self.outbox.sent, self._taken_up)
        for number, call in list(self._calls.items()):
            if number > begun:
                call.end(grpc.StatusCode.UNAVAILABLE, f"{NEVER_SENT}: {reason}, and the call was not begun")
            else:
                call.end(grpc.StatusCode.UNAVAILABLE, reason)


def _split(metadata: Iterable[Pair]) -> tuple[str, str, list[str], int]:
    """The request id, the trace context, the rest in the lane's form, its bytes, about. Raises as `flatten` does."""
    request_id = traceparent = ""
    rest: list[Pair] = []
    for pair in metadata:
        # The last one counts, as in plain gRPC's dictionaries: the caller's own metadata follows ours.
        if pair[0] == REQUEST_ID_KEY:
            request_id = text_of(*pair)
        elif pair[0] == TRACEPARENT_KEY:
            traceparent = text_of(*pair)
        else:
            rest.append(pair)
    if not rest:  # as nearly all calls have it
        return request_id, traceparent, [], 0
    others = flatten(rest)
    return request_id, traceparent, others, size_of(others)


Connect = Callable[[str, Callable[[], None]], Connection]
"""Address, and what to call when `ready` changes."""

TRANSPORTS: dict[str, type[LaneConnection | GrpcConnection]] = {"lane": LaneConnection, "grpc": GrpcConnection}
"""`handle(..., transport=...)` -> what connects: a class that implements `Connection`."""
