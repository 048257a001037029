"""The controller's store, as other processes use it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import grpc

from pierhead.discovery.v1 import store_pb2, store_pb2_grpc
from pierhead.errors import StoreUnavailable
from pierhead.store.bounds import MOST_IN_FLIGHT, check_keys, check_ttl, check_values

TIMEOUT_S = 0.1
"""How long a request may take: calls wait for it before they are sent."""

REST_S = 1.0
"""How long no request is made after one was not answered. A controller that hangs then delays a few calls, not all."""

CONTROLLER_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
"""Of every connection to the controller: one to a controller that has gone without a word ends within 15 s."""

M = TypeVar("M")


class RemoteStore:
    """A Store at a controller's address; used in one event loop. Connects when it is first used."""

    def __init__(
        self, address: str, *, timeout_s: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._stub: store_pb2_grpc.SharedStoreAsyncStub | None = None
        self._in_flight = 0
        self._rests_until = 0.0
        self._why = ""

    async def get(self, keys: Sequence[str]) -> dict[str, str]:
        """See Store."""
        check_keys(keys)
        reply = await self._ask(lambda stub: stub.Get(store_pb2.GetRequest(keys=keys), timeout=self._timeout_s))
        return dict(reply.values)

    async def set(self, values: Mapping[str, str], ttl_s: float) -> None:
        """See Store."""
        check_values(values, ttl_s)
        request = store_pb2.SetRequest(values=values, ttl_s=ttl_s)
        await self._ask(lambda stub: stub.Set(request, timeout=self._timeout_s))

    async def incr(self, key: str, by: int, ttl_s: float) -> int:
        """See Store."""
        check_keys([key])
        check_ttl(ttl_s)
        request = store_pb2.IncrementRequest(key=key, by=by, ttl_s=ttl_s)
        reply = await self._ask(lambda stub: stub.Increment(request, timeout=self._timeout_s))
        return reply.value

    async def close(self) -> None:
        """End the connection; the next request makes another one."""
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()

    async def _ask(self, call: Callable[[store_pb2_grpc.SharedStoreAsyncStub], Awaitable[M]]) -> M:
        if self._clock() < self._rests_until:
            raise StoreUnavailable(self._why)
        if self._in_flight >= MOST_IN_FLIGHT:
            raise StoreUnavailable(
                f"shared store: not asked: {MOST_IN_FLIGHT} requests of this process wait for its answer already"
            )
        if self._stub is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=CONTROLLER_OPTIONS)
            self._stub = store_pb2_grpc.SharedStoreStub(self._channel)
        self._in_flight += 1
        try:
            return await call(self._stub)
        except grpc.aio.AioRpcError as error:
            details = error.details() or error.code().name
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(details) from None
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise StoreUnavailable(details) from None
            self._rests_until = self._clock() + REST_S
            self._why = f"shared store: the controller at {self._address} does not answer: {details}"
            raise StoreUnavailable(self._why) from None
        finally:
            self._in_flight -= 1
