"""A `grpc.aio.Channel` whose calls go to the replicas of a service: what `handle` builds the generated stub on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any

import grpc

from pierhead.calls.binding import Binding, HandleOptions
from pierhead.calls.call import Call
from pierhead.calls.kinds import StreamStreamCall, StreamUnaryCall, UnaryStreamCall, UnaryUnaryCall
from pierhead.calls.pool import Pool
from pierhead.lanes.connection import Method, MethodKind
from pierhead.metrics import PROCESS, RuntimeMetrics
from pierhead.policies.router import PolicyRouter
from pierhead.serve_block import DEFAULT_POLICY

_NO_CREDENTIALS = "a handle's connections are plain text within the stack: call credentials cannot be sent"


class HandleChannel(grpc.aio.Channel):
    """The channel behind one handle. May be created at import, outside any event loop; binds to each loop that calls.

    `options` are those of `HandleOptions`. Raises ValueError for a policy that cannot be created.
    """

    def __init__(
        self, service: str, *, metrics: RuntimeMetrics | None = None, rng: Random | None = None, **options: Any
    ) -> None:
        self.options = HandleOptions(service, **options)
        self.metrics = metrics or PROCESS
        self._rng = rng or Random()  # noqa: S311 - load balancing
        # The first loop's router is created now: an unknown policy name raises where the handle is created.
        self._spare_router: PolicyRouter | None = self._make_router()
        self._bindings: dict[asyncio.AbstractEventLoop, Binding] = {}
        self._latest: Binding | None = None

    def binding(self) -> Binding:
        """This handle in the running loop."""
        binding = self._latest
        if binding is None or binding.loop is not asyncio.get_running_loop() or binding.pool.closed:
            binding = self._latest = self._bind()
        return binding

    def pool(self) -> Pool:
        """The service's pool of the running loop."""
        return self.binding().pool

    @property
    def queued(self) -> int:
        """Calls that wait in line."""
        return sum(binding.queued for binding in list(self._bindings.values()))

    def _bind(self) -> Binding:
        loop = asyncio.get_running_loop()
        known = self._bindings.get(loop)
        if known is not None and not known.pool.closed:
            return known
        for gone in [other for other in list(self._bindings) if other.is_closed()]:
            self._bindings.pop(gone, None)
        router, self._spare_router = self._spare_router or self._make_router(), None
        binding = self._bindings[loop] = Binding(self.options, router, self.metrics)
        return binding

    def _make_router(self) -> PolicyRouter:
        options = self.options
        return PolicyRouter(
            options.policy or DEFAULT_POLICY,
            Random(self._rng.random()),  # noqa: S311 - one for each thread
            kwargs=options.policy_kwargs,
            follows=options.policy is None,
            prefer_local=options.prefer_local,
            eject_outliers=options.eject_outliers,
        )

    # ---- what generated stubs ask for

    def unary_unary(self, method: str, *codec: Any, **options: Any) -> Any:
        """One request, one reply."""
        return self._begins(UnaryUnaryCall, MethodKind.UNARY_UNARY, method, *codec, **options)

    def unary_stream(self, method: str, *codec: Any, **options: Any) -> Any:
        """One request, many replies."""
        return self._begins(UnaryStreamCall, MethodKind.UNARY_STREAM, method, *codec, **options)

    def stream_unary(self, method: str, *codec: Any, **options: Any) -> Any:
        """Many requests, one reply."""
        return self._begins(StreamUnaryCall, MethodKind.STREAM_UNARY, method, *codec, **options)

    def stream_stream(self, method: str, *codec: Any, **options: Any) -> Any:
        """Many requests, many replies."""
        return self._begins(StreamStreamCall, MethodKind.STREAM_STREAM, method, *codec, **options)

    def _begins(
        self,
        call: Callable[..., Call],
        kind: MethodKind,
        path: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Callable[..., Call]:
        """What begins the calls of one method, with the arguments of `grpc.aio`."""
        method = Method(kind, path, request_serializer, response_deserializer, bool(_registered_method))

        def stream(
            request_iterator: Any = None,
            timeout: float | None = None,
            metadata: Any = None,
            credentials: grpc.CallCredentials | None = None,
            wait_for_ready: bool | None = None,
            compression: grpc.Compression | None = None,
        ) -> Call:
            if credentials is not None:
                raise ValueError(_NO_CREDENTIALS)
            return call(self.binding(), method, request_iterator, timeout, metadata, compression)

        def unary(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: Any = None,
            credentials: grpc.CallCredentials | None = None,
            wait_for_ready: bool | None = None,
            compression: grpc.Compression | None = None,
        ) -> Call:
            if credentials is not None:
                raise ValueError(_NO_CREDENTIALS)
            return call(self.binding(), method, request, timeout, metadata, compression)

        return stream if method.request_streaming else unary

    # ---- the rest of grpc.aio.Channel

    async def __aenter__(self) -> HandleChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Does nothing: connections belong to the process and are shared by its handles; see `close_handles`."""

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
