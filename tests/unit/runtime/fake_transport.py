"""A transport whose replicas answer what a test tells them to, without a network and in the turn it says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
import pytest
from pierhead import Settings
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.calls.replica import Endpoint, Replica, ReplicaListing
from pierhead.lanes.client import TRANSPORTS
from pierhead.lanes.connection import Method, MethodKind
from pierhead.metrics import RuntimeMetrics


class FakeCall:
    """What a transport returns for a call, of any kind."""

    def __init__(self, connection: FakeConnection, request: Any, timeout: float, metadata: Any) -> None:
        self.connection = connection
        self.request = request
        self.timeout = timeout
        self.metadata = dict(metadata)
        self.written: list[Any] = []
        self._ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._messages: deque[Any] = deque()
        self._came = asyncio.Event()
        self._trailers: tuple[tuple[str, str], ...] = ()
        self._code = grpc.StatusCode.OK
        self._callbacks: list[Callable[[Any], object]] = []

    # ---- what the test has the replica do

    def reply(self, message: Any = "reply", **trailers: str) -> None:
        """End well."""
        self._trailers = _pairs(trailers)
        self._end(message)

    def message(self, message: Any) -> None:
        """Send one of many messages."""
        self._messages.append(message)
        self._came.set()

    def fail(self, code: grpc.StatusCode, details: str = "", **trailers: str) -> None:
        """End badly."""
        self._code = code
        self._trailers = _pairs(trailers)
        self._end(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*self._trailers), details))

    def refuse(self, reason: str = "overloaded", ongoing: int = 1) -> None:
        """End as a full or draining replica ends it."""
        status = grpc.StatusCode.UNAVAILABLE if reason == "draining" else grpc.StatusCode.RESOURCE_EXHAUSTED
        kind = "draining" if reason == "draining" else "backpressure"
        self.fail(status, "refused", refused=reason, error=kind, ongoing=str(ongoing))

    def _end(self, result: Any) -> None:
        if self._ended.done():
            return
        if isinstance(result, BaseException):
            self._ended.set_exception(result)
            self._ended.exception()
        else:
            self._ended.set_result(result)
        self._came.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    # ---- as grpc.aio.Call

    def cancel(self) -> bool:
        if self._ended.done():
            return False
        self._code = grpc.StatusCode.CANCELLED
        self._end(asyncio.CancelledError())
        return True

    def cancelled(self) -> bool:
        return self._code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._ended.done()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from asyncio.shield(self._ended).__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        while not self._messages:
            if self._ended.done():
                self._ended.result()
                return grpc.aio.EOF
            self._came.clear()
            await self._came.wait()
        return self._messages.popleft()

    async def write(self, request: Any) -> None:
        if self._ended.done():
            if self.connection.as_grpc:
                raise asyncio.InvalidStateError
            self._ended.result()
        self.written.append(request)

    async def done_writing(self) -> None:
        await self.write(None)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*self._trailers)

    async def code(self) -> grpc.StatusCode:
        return self._code

    async def details(self) -> str:
        error = self._ended.exception()
        return (error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else ""


class FakeConnection:
    """The way to one replica: what was called there lies in `calls`."""

    def __init__(self, address: str, changed: Callable[[], None]) -> None:
        self.address = address
        self.ready = True
        self.calls: list[FakeCall] = []
        self.checks = 0
        self.raises: Exception | None = None
        self.as_grpc = False
        """A write after the end raises InvalidStateError, as a plain channel's does."""
        self._changed = changed

    @property
    def now(self) -> list[FakeCall]:
        """Calls there that have not ended."""
        return [call for call in self.calls if not call.done()]

    def become(self, ready: bool) -> None:
        self.ready = ready
        self._changed()

    def open(
        self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any, *, patient: bool = False
    ) -> FakeCall:
        assert isinstance(method.kind, MethodKind)
        if self.raises is not None:
            raise self.raises
        self.calls.append(FakeCall(self, request, timeout, metadata))
        return self.calls[-1]

    def check(self) -> None:
        self.checks += 1

    async def close(self) -> None:
        self.ready = False
        for call in self.now:
            call.fail(grpc.StatusCode.UNAVAILABLE, "closed")


class FakeService:
    """A handle to replicas r0, r1, ... behind fake connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicas: int, **settings: Any) -> None:
        self._connections: dict[str, FakeConnection] = {}
        monkeypatch.setitem(TRANSPORTS, "fake", self._connect)
        static = {"FAKE": tuple(f"r{number}:1" for number in range(replicas))}
        Clients.use(Settings(static=static, **settings))

    def channel(self, *, limit: int = 0, **options: Any) -> HandleChannel:
        """A handle; with a `limit`, r0 alone is listed, and takes so many calls at a time."""
        channel = HandleChannel("fake", transport="fake", metrics=RuntimeMetrics(), **options)
        pool = channel.pool()
        if limit:
            pool.update(ReplicaListing([Endpoint("r0", "r0:1", max_ongoing_requests=limit)]))
        return channel

    def __getitem__(self, name: str) -> FakeConnection:
        return self._connections[f"{name}:1"]

    def replica(self, channel: HandleChannel, name: str) -> Replica:
        return next(replica for replica in channel.pool().replicas() if replica.address == f"{name}:1")

    @property
    def calls(self) -> list[FakeCall]:
        """Calls at any replica that have not ended."""
        return [call for connection in self._connections.values() for call in connection.now]

    def _connect(self, address: str, changed: Callable[[], None], service: str = "") -> FakeConnection:
        made = self._connections[address] = FakeConnection(address, changed)
        return made


def _pairs(trailers: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"pierhead-{key}", value) for key, value in trailers.items())


Make = Callable[..., FakeService]
