"""The connection from this process to one replica: the interface of every transport, and plain gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import grpc

from pierhead.memory import process
from pierhead.memory.link import Link
from pierhead.memory.link_setup import LinkSetup, meet
from pierhead.memory.scope import SCOPE
from pierhead.memory.sharing import LINK_KEY, Sharing
from pierhead.memory.walk import may_hold_tensors
from pierhead.tasks import end_tasks

NEVER_SENT = "failed to connect to all addresses"
"""The start of the message of a call that was surely not begun: gRPC's core uses it for a call without a connection,
and so does every other transport here."""

FOREIGN_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One connection per channel: a new replica must not inherit an older channel's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
"""For servers that are not ours. No keep-alive pings: gRPC servers end connections, and the calls on them, for pings
that come more often than every five minutes. The controller's probe notices a replica that hangs."""

CHANNEL_OPTIONS = (
    *FOREIGN_CHANNEL_OPTIONS,
    # A peer that hangs or whose machine is gone answers no ping: its calls fail after five seconds at most.
    # The ping's own timeout has to be set too: gRPC also sends pings for its flow control, waits a minute for their
    # answer by default, and sends no keep-alive ping until then.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


class MethodKind(Enum):
    """The four shapes of a gRPC method; the values are the factory's names on a channel."""

    UNARY_UNARY = "unary_unary"
    UNARY_STREAM = "unary_stream"
    STREAM_UNARY = "stream_unary"
    STREAM_STREAM = "stream_stream"


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """One method of a generated stub."""

    kind: MethodKind
    path: str
    """/package.Service/Method"""
    request_serializer: Callable[[Any], bytes] | None
    response_deserializer: Callable[[bytes], Any] | None
    registered: bool

    @property
    def request_streaming(self) -> bool:
        """Whether its requests are a stream."""
        return self.kind in (MethodKind.STREAM_UNARY, MethodKind.STREAM_STREAM)

    @property
    def response_streaming(self) -> bool:
        """Whether its replies are a stream."""
        return self.kind in (MethodKind.UNARY_STREAM, MethodKind.STREAM_STREAM)


def sharing_of(link: Link | None, method: Method, request: Any) -> Sharing | None:
    """The use of shared memory by a call that begins; None if its messages hold no tensors."""
    memory = process.MEMORY
    classes = (
        None if method.request_streaming else type(request),
        getattr(method.response_deserializer, "__self__", None),
    )
    if memory is None or not any(map(may_hold_tensors, classes)):
        return None
    number = 0 if link is None else link.begin()
    many_in, many_out = method.response_streaming, method.request_streaming
    return Sharing(memory, link, SCOPE.get(), many_in=many_in, many_out=many_out, number=number)


class Connection(Protocol):
    """The interface of a transport for the pool and for calls."""

    ready: bool
    """True while calls can be sent at once."""

    def open(
        self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any, *, patient: bool = False
    ) -> Any:
        """Begin a call and return the `grpc.aio` call object of its kind. `request` is an iterator or None for
        request-streaming kinds. `patient`: no replica is known to have room, so a full one may queue the call instead
        of refusing it; a transport that cannot send this flag ignores it. Never blocks.
        """
        ...

    def check(self) -> None:
        """Read the state now: a call has just failed."""
        ...

    async def close(self) -> None:
        """End the connection; calls on it fail."""
        ...


class GrpcConnection:
    """One HTTP/2 connection, kept open for as long as the replica is known, and watched."""

    def __init__(
        self,
        address: str,
        changed: Callable[[], None],
        service: str = "",
        link: Callable[[], Link | None] | None = None,
        options: tuple[tuple[str, int], ...] = CHANNEL_OPTIONS,
    ) -> None:
        """`service`: the one that the replica belongs to; "" = memory is not shared by links of this connection's own.
        `link`: the link of the lane to the same replica.
        """
        self.ready = False
        self._changed = changed
        self._service = service
        self._link = link or (lambda: None if self._link_setup is None else self._link_setup.link)
        self._link_setup: LinkSetup | None = None
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self._methods: dict[Method, Any] = {}
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name=f"connection {address}")

    def open(
        self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any, *, patient: bool = False
    ) -> Any:
        """Begin a call; see Connection."""
        if process.MEMORY is not None:
            sharing = sharing_of(self._link(), method, request)
            if sharing is not None:
                return self.open_shared(sharing, method, request, timeout, metadata, compression)
        start = self._methods.get(method)
        if start is None:
            make = getattr(self.channel, method.kind.value)
            start = self._methods[method] = make(
                method.path, method.request_serializer, method.response_deserializer, method.registered
            )
        return start(request, timeout=timeout, metadata=metadata, compression=compression)

    def open_shared(
        self, sharing: Sharing, method: Method, request: Any, timeout: float, metadata: Any, compression: Any
    ) -> Any:
        """Begin a call whose messages may hold tensors in shared memory. The call's codec keeps `sharing` alive."""
        encode, decode = method.request_serializer, method.response_deserializer
        if method.request_streaming:
            stream_encode = encode or bytes
            encode = lambda message: stream_encode(sharing.outgoing(message))  # noqa: E731
        else:
            request = sharing.outgoing(request)
        link = self._link()
        if link is not None and link.open:
            metadata = (*(metadata or ()), (LINK_KEY, link.token.hex()))
        make = getattr(self.channel, method.kind.value)
        start = make(
            method.path, encode, lambda raw: sharing.incoming(raw if decode is None else decode(raw)), method.registered
        )
        return start(request, timeout=timeout, metadata=metadata, compression=compression)

    def check(self) -> None:
        """Read the state now instead of waiting for the watcher's turn."""
        self._set(self.channel.get_state(try_to_connect=True))

    async def close(self) -> None:
        """Close the channel and end the watcher."""
        self.ready = False
        self._meet(False)
        await self.channel.close()
        await end_tasks(self._watcher)

    def _set(self, state: grpc.ChannelConnectivity) -> None:
        ready = state is grpc.ChannelConnectivity.READY
        if ready is not self.ready:
            self.ready = ready
            self._meet(ready)
            self._changed()

    def _meet(self, ready: bool) -> None:
        """Share memory with the process that answers, from the connection to its loss."""
        if self._link_setup is not None:
            self._link_setup.end()
        self._link_setup = meet(self._service, self.channel) if ready else None

    async def _watch(self) -> None:
        """Keep `ready` equal to the channel's state, and keep the channel connecting."""
        while True:
            state = self.channel.get_state(try_to_connect=True)
            self._set(state)
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                return
            await self.channel.wait_for_state_change(state)
