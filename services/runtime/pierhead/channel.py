"""A `grpc.aio.Channel` whose calls go to the replicas of a service: what `handle` builds the generated stub on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any

import grpc

from pierhead import metrics as runtime_metrics
from pierhead.calls import RETRY_REASONS, Call, StreamStreamCall, StreamUnaryCall, UnaryStreamCall, UnaryUnaryCall
from pierhead.clients import Clients
from pierhead.connection import Kind, Method
from pierhead.deadlines import Deadlines
from pierhead.errors import Backpressure, NoReplica
from pierhead.pool import Pool
from pierhead.routing import Router


class HandleChannel(grpc.aio.Channel):
    """The channel behind one handle. May be made at import, outside any event loop; binds to the loop that calls."""

    def __init__(
        self,
        service: str,
        *,
        policy: str = "power_of_two",
        timeout_s: float | None = None,
        max_queued_requests: int | None = None,
        transport: str | None = None,
        prefer_local: bool = False,
        eject_outliers: bool = True,
        metrics: runtime_metrics.RuntimeMetrics | None = None,
        rng: Random | None = None,
    ) -> None:
        self.service = service
        self.router = Router(
            policy,
            rng or Random(),  # noqa: S311 - load balancing
            prefer_local=prefer_local,
            eject_outliers=eject_outliers,
        )
        self.metrics = metrics or runtime_metrics.PROCESS
        self.queued = 0
        self.typical_s = 0.0
        """How long a unary call takes at a replica, by a moving average."""
        self.timeout_s = 0.0
        self.deadlines: Deadlines
        self._timeout_s = timeout_s
        self._max_queued = max_queued_requests
        self._max_queued_default = -1
        self._transport = transport
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Pool
        self._target = (service,)
        self._ok = (service, "ok")

    def pool(self) -> Pool:
        """The service's pool of the running loop."""
        if asyncio.get_running_loop() is not self._loop or self._pool.closed:
            self._bind()
        return self._pool

    def is_current(self) -> bool:
        """Whether this is the thread, and the loop, that the channel's calls were made in."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _bind(self) -> None:
        clients = Clients.current()
        settings = clients.settings
        self._pool = clients.pool(self.service, self._transport or settings.transport)
        self._pool.watch(self.router)
        self.router.node = settings.node
        self.timeout_s = settings.request_timeout_s if self._timeout_s is None else self._timeout_s
        self._max_queued_default = settings.max_queued_requests
        self.deadlines = Deadlines.current()
        self._loop = asyncio.get_running_loop()
        self._show_zeros()

    def _show_zeros(self) -> None:
        """Make the target's series exist before anything has happened: a panel shows 0 rather than nothing."""
        self.metrics.queued.inc(self._target, 0)
        self.metrics.handle_requests.inc(self._ok, 0)
        self.metrics.handle_ejections.inc(self._target, 0)
        for reason in RETRY_REASONS:
            self.metrics.handle_retries.inc((self.service, reason), 0)

    # ---- the line

    @property
    def max_queued(self) -> int:
        """How many calls of this handle may wait: its own bound, else the service's, else this process's; -1 = any."""
        if self._max_queued is not None:
            return self._max_queued
        told = self._pool.max_queued_requests
        return self._max_queued_default if told is None else told

    def patience(self, remaining: float, *, returned: bool) -> float:
        """Seconds that a call may wait in line which has `remaining` seconds left. Raises Backpressure or NoReplica
        when the line is full; a call that has `returned`, because a replica refused it, had its place already.

        It ends so long before the deadline that the caller hears why, and that a call which starts can still be
        finished: when everything is full, work that ends after its deadline would crowd out work that is in time.
        """
        limit = self.max_queued
        if 0 <= limit <= self.queued and not returned:
            raise self.refusal(f"{self.queued} calls wait already (max_queued_requests = {limit})")
        margin = max(min(0.05, 0.1 * remaining), min(1.5 * self.typical_s, 0.5 * remaining))
        return max(0.0, remaining - margin)

    def joined(self, calls: int) -> None:
        """Count a call that joined the line, or -1 for one that left it."""
        self.queued += calls
        self.metrics.queued.inc(self._target, calls)

    def refusal(self, why: str) -> Backpressure | NoReplica:
        """What a call hears for which there is no replica."""
        what = f"{self._pool.describe()}; {why}; try later"
        if self._pool.has_callable:
            return Backpressure(f"every replica of {self.service} is full: {what}")
        return NoReplica(f"no replica of {self.service} can be called: {what}")

    # ---- what calls tell

    def succeeded(self, seconds: float) -> None:
        """Count a call that was answered."""
        self.metrics.handle_requests.inc(self._ok)
        self.metrics.handle_duration.observe(self._target, seconds)

    def ended(self, outcome: str, seconds: float) -> None:
        """Count a call, however it ended."""
        self.metrics.handle_requests.inc((self.service, outcome))
        self.metrics.handle_duration.observe(self._target, seconds)

    def took(self, seconds: float) -> None:
        """Learn how long a call was at a replica."""
        self.typical_s += 0.1 * (seconds - self.typical_s)

    def retried(self, reason: str) -> None:
        """Count a call that goes to another replica."""
        self.metrics.handle_retries.inc((self.service, reason))

    # ---- what generated stubs ask for

    def unary_unary(self, method: str, *codec: Any, **options: Any) -> Any:
        """One request, one reply."""
        return _UnaryRequest(self, UnaryUnaryCall, _method(Kind.UNARY_UNARY, method, *codec, **options))

    def unary_stream(self, method: str, *codec: Any, **options: Any) -> Any:
        """One request, many replies."""
        return _UnaryRequest(self, UnaryStreamCall, _method(Kind.UNARY_STREAM, method, *codec, **options))

    def stream_unary(self, method: str, *codec: Any, **options: Any) -> Any:
        """Many requests, one reply."""
        return _StreamRequest(self, StreamUnaryCall, _method(Kind.STREAM_UNARY, method, *codec, **options))

    def stream_stream(self, method: str, *codec: Any, **options: Any) -> Any:
        """Many requests, many replies."""
        return _StreamRequest(self, StreamStreamCall, _method(Kind.STREAM_STREAM, method, *codec, **options))

    # ---- the rest of grpc.aio.Channel

    async def __aenter__(self) -> HandleChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Nothing: connections belong to the process and are shared by its handles; see `close_handles`."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """READY while any replica may be called, else CONNECTING."""
        ready = self.pool().has_callable
        return grpc.ChannelConnectivity.READY if ready else grpc.ChannelConnectivity.CONNECTING

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return once the state differs."""
        pool = self.pool()
        while self.get_state() is last_observed_state:
            await pool.changed()

    async def channel_ready(self) -> None:
        """Return once a replica may be called."""
        while self.get_state() is not grpc.ChannelConnectivity.READY:
            await self.wait_for_state_change(grpc.ChannelConnectivity.CONNECTING)


def _method(
    kind: Kind,
    path: str,
    request_serializer: Any = None,
    response_deserializer: Any = None,
    _registered_method: bool | None = False,
) -> Method:
    return Method(kind, path, request_serializer, response_deserializer, bool(_registered_method))


class _MultiCallable:
    """What a stub's attribute is: calling it begins a call."""

    def __init__(self, channel: HandleChannel, begin: Callable[..., Call], method: Method) -> None:
        self._channel = channel
        self._begin = begin
        self._method = method


class _UnaryRequest(_MultiCallable):
    def __call__(
        self,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        if credentials is not None:
            raise _no_credentials()
        return self._begin(self._channel, self._method, request, timeout, metadata, compression)


class _StreamRequest(_MultiCallable):
    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        if credentials is not None:
            raise _no_credentials()
        return self._begin(self._channel, self._method, request_iterator, timeout, metadata, compression)


def _no_credentials() -> ValueError:
    return ValueError("a handle's connections are plain text within the stack: call credentials cannot be sent")
