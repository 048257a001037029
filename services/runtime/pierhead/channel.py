"""A `grpc.aio.Channel` whose calls go to the replicas of a service: what `handle` builds the generated stub on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any, NoReturn

import grpc

from pierhead import metrics as runtime_metrics
from pierhead.calls import RETRY_REASONS, Call, StreamStreamCall, StreamUnaryCall, UnaryStreamCall, UnaryUnaryCall
from pierhead.clients import Clients
from pierhead.connection import Kind, Method
from pierhead.errors import Backpressure, NoReplica
from pierhead.policies import make_policy
from pierhead.pool import Pool, Replica


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
        metrics: runtime_metrics.RuntimeMetrics | None = None,
        rng: Random | None = None,
    ) -> None:
        self.service = service
        self.policy = make_policy(policy, rng or Random())  # noqa: S311 - load balancing
        self.metrics = metrics or runtime_metrics.PROCESS
        self.queued = 0
        self.typical_s = 0.0
        """How long a unary call takes at a replica, by a moving average."""
        self._timeout_s = timeout_s
        self._max_queued = max_queued_requests
        self._transport = transport
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Pool
        self.timeout_s = 0.0
        self.max_queued = -1
        self._target = (service,)

    def pool(self) -> Pool:
        """The service's pool of the running loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop or self._pool.closed:
            clients = Clients.current()
            self._pool = clients.pool(self.service, self._transport or clients.settings.transport)
            settings = clients.settings
            self.timeout_s = settings.request_timeout_s if self._timeout_s is None else self._timeout_s
            self.max_queued = settings.max_queued_requests if self._max_queued is None else self._max_queued
            self._loop = loop
            self._show_zeros()
        return self._pool

    def _show_zeros(self) -> None:
        """Make the target's series exist before anything has happened: a panel shows 0 rather than nothing."""
        self.metrics.queued.inc(self._target, 0)
        self.metrics.handle_requests.inc((self.service, "ok"), 0)
        for reason in RETRY_REASONS:
            self.metrics.handle_retries.inc((self.service, reason), 0)

    async def wait_in_line(self, pool: Pool, deadline: float, *, first: bool = False) -> Replica:
        """A replica for a call that found none with room. Raises Backpressure or NoReplica."""
        if 0 <= self.max_queued <= self.queued and not first:
            self._refuse(pool, f"{self.queued} calls wait already (max_queued_requests = {self.max_queued})")
        remaining = max(0.0, deadline - time.monotonic())
        # So long before the deadline that the caller hears why, and that a call which starts can still be finished:
        # when everything is full, work that ends after its deadline would crowd out work that is in time.
        margin = max(min(0.05, 0.1 * remaining), min(1.5 * self.typical_s, 0.5 * remaining))
        limit = remaining - margin
        self.queued += 1
        self.metrics.queued.inc(self._target)
        try:
            async with asyncio.timeout(limit):
                return await pool.wait(self.policy, first=first)
        except TimeoutError:
            self._refuse(pool, f"none had room within {limit:.3g} s")
        finally:
            self.queued -= 1
            self.metrics.queued.inc(self._target, -1)

    def _refuse(self, pool: Pool, why: str) -> NoReturn:
        if pool.has_callable:
            raise Backpressure(f"every replica of {self.service} is full: {pool.describe()}; {why}; try later")
        raise NoReplica(f"no replica of {self.service} can be called: {pool.describe()}; {why}; try later")

    def ended(self, outcome: str, seconds: float) -> None:
        """Count a call."""
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

    def _call(self, request: Any, timeout: float | None, metadata: Any, credentials: Any, compression: Any) -> Any:
        if credentials is not None:
            raise ValueError("a handle's connections are plain text within the stack: call credentials cannot be sent")
        return self._begin(self._channel, self._method, request, timeout, metadata, compression)


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
        return self._call(request, timeout, metadata, credentials, compression)


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
        return self._call(request_iterator, timeout, metadata, credentials, compression)
