"""The connection from `pierhead.triton` to one server, and when it sends a call.

a request whose inputs are in GPU memory -> once they are registered
a call that loads its model on demand    -> once the model is loaded
any other call                           -> at once
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

from tritonclient.grpc import service_pb2_grpc

from pierhead.calls.clients import Clients
from pierhead.errors import DeadlineExceeded
from pierhead.lanes.client import TRANSPORTS
from pierhead.lanes.connection import FOREIGN_CHANNEL_OPTIONS, GrpcConnection, Method
from pierhead.multiplex.cache import Entry
from pierhead.request import MODEL_KEY, TRACEPARENT_KEY
from pierhead.triton.large_request import LargeRequest
from pierhead.triton.models import TRANSPORT, LoadedModel, LoadedModels
from pierhead.triton.regions import TritonRegions

LOAD_KEY = "pierhead-triton-load"
"""Metadata of a call whose model is to be loaded: "1", or "again" where the server turned out not to have it."""


class TritonConnection(GrpcConnection):
    """The connection to one server."""

    def __init__(self, address: str, changed: Callable[[], None], service: str = "") -> None:
        super().__init__(address, changed, options=FOREIGN_CHANNEL_OPTIONS)
        self._loop = asyncio.get_running_loop()
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self._regions = TritonRegions(self._stub, Clients.current().settings.triton_shared_memory_dir)
        self._called = service
        self._models: LoadedModels | None = None

    def open(
        self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any, *, patient: bool = False
    ) -> Any:
        """Begin a call; see Connection."""
        pairs, until = dict(metadata), self._loop.time() + timeout
        # Triton reads no other header of ours, and each costs more than all else that a handle adds to a call.
        traced = tuple(pair for pair in metadata if pair[0] == TRACEPARENT_KEY) or None
        send = partial(self._send, method, request, until, traced, compression)
        if LOAD_KEY not in pairs:
            return send()
        return self._open_with(pairs[MODEL_KEY], pairs[LOAD_KEY] == "again", until, send)

    async def close(self) -> None:
        """Unregister its memory, and close the channel. Models stay loaded: other processes use them, too."""
        if self._models is not None:
            await self._models.cache.close()
        await self._regions.close()
        await super().close()

    def _send(self, method: Method, request: Any, until: float, metadata: Any, compression: Any) -> Any:
        def begin(message: Any) -> Any:
            left = until - self._loop.time()
            return GrpcConnection.open(self, method, message, left, metadata, compression)

        async def begin_registered(message: Any) -> Any:
            try:
                async with asyncio.timeout_at(until):
                    await request.registered()
            except TimeoutError:
                raise DeadlineExceeded("inputs in GPU memory were not registered in time") from None
            return begin(message)

        if not isinstance(request, LargeRequest):
            return begin(request)
        message = request.message(self._regions)
        return _PreparedCall(begin_registered(message)) if request.on_gpu else begin(message)

    def _open_with(self, model: str, again: bool, until: float, send: Callable[[], Any]) -> Any:
        """Begin a call for a model, which is loaded first if necessary, and stays while the call is in flight."""
        models = self._models
        if models is None:
            models = self._models = LoadedModels(self._stub, self._called, self)

        def use(entry: Entry[LoadedModel]) -> Any:
            try:
                call = send()
            except BaseException:
                models.cache.release(entry)
                raise
            call.add_done_callback(lambda _: models.cache.release(entry))
            return call

        async def use_loaded() -> Any:
            return use(await models.acquire(model, again, until))

        entry = None if again else models.cache.acquire_loaded(model)
        if entry is not None:
            return use(entry)
        models.report(model)
        return _PreparedCall(use_loaded())

    def _meet(self, ready: bool) -> None:
        if ready:
            return
        self._regions.lost()
        if self._models is not None:
            self._closing = self._loop.create_task(self._models.cache.close())
            self._models = None


TRANSPORTS[TRANSPORT] = TritonConnection


def _later(name: str) -> Any:
    async def ask(self: _PreparedCall, *arguments: Any) -> Any:
        return await getattr(await self._opening, name)(*arguments)

    return ask


class _PreparedCall:
    """A call that is sent later: `opening` returns the transport's call. As far as handles use one."""

    read, write, done_writing = _later("read"), _later("write"), _later("done_writing")
    initial_metadata, trailing_metadata = _later("initial_metadata"), _later("trailing_metadata")
    code, details = _later("code"), _later("details")

    def __init__(self, opening: Coroutine[Any, Any, Any]) -> None:
        self._opening = asyncio.get_running_loop().create_task(opening)

    @property
    def _call(self) -> Any:
        """The transport's call; its opening where there is none."""
        opening = self._opening
        return opening.result() if opening.done() and not opening.cancelled() and not opening.exception() else opening

    def __await__(self) -> Generator[Any, None, Any]:
        call = yield from self._opening.__await__()
        return (yield from call.__await__())

    def cancel(self) -> bool:
        return bool(self._call.cancel())

    def cancelled(self) -> bool:
        return bool(self._call.cancelled())

    def done(self) -> bool:
        return bool(self._call.done())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        def opened(_: Any) -> None:
            call = self._call
            callback(self) if call is self._opening else call.add_done_callback(callback)

        self._opening.add_done_callback(opened)
