"""The connection from `pierhead.triton` to one server, and when it sends a call.

a request whose inputs are in GPU memory -> once they are registered
a call that loads its model on demand    -> once the model is loaded
any other call                           -> at once
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

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
        self._regions = TritonRegions(self.channel, Clients.current().settings.triton_shared_memory_dir)
        self._called = service
        self._models: LoadedModels | None = None

    def open(
        self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any, *, patient: bool = False
    ) -> Any:
        """Begin a call; see Connection."""
        pairs = dict(metadata)
        if LOAD_KEY in pairs:
            return self._open_with(pairs[MODEL_KEY], pairs[LOAD_KEY] == "again", method, request, timeout, metadata)
        return self._send(method, request, timeout, metadata, compression)

    async def close(self) -> None:
        """Unregister its memory, and close the channel. Models stay loaded: other processes use them, too."""
        if self._models is not None:
            await self._models.cache.close()
        await self._regions.close()
        await super().close()

    def _send(self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any = None) -> Any:
        # Triton reads no other header of ours, and each costs more than all else that a handle adds to a call.
        traced = tuple(pair for pair in metadata if pair[0] == TRACEPARENT_KEY) or None
        if isinstance(request, LargeRequest):
            message = request.message(self._regions)
            if request.on_gpu:
                sending = self._send_registered(request, method, message, timeout, traced, compression)
                return _PreparedCall(asyncio.get_running_loop().create_task(sending))
            request = message
        return super().open(method, request, timeout, traced, compression)

    async def _send_registered(
        self, request: LargeRequest, method: Method, message: Any, timeout: float, metadata: Any, compression: Any
    ) -> Any:
        """Begin a call once the server has mapped what it is to read."""
        until = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(until):
                await request.registered()
        except TimeoutError:
            raise DeadlineExceeded("inputs in GPU memory were not registered in time") from None
        return super().open(method, message, until - asyncio.get_running_loop().time(), metadata, compression)

    def _open_with(self, model: str, again: bool, method: Method, request: Any, timeout: float, metadata: Any) -> Any:
        """Begin a call for a model, which is loaded first if necessary, and stays while the call is in flight."""
        models = self._models
        if models is None:
            models = self._models = LoadedModels(self.channel, self._called, self)
        until = asyncio.get_running_loop().time() + timeout

        def send(entry: Entry[LoadedModel]) -> Any:
            try:
                call = self._send(method, request, until - asyncio.get_running_loop().time(), metadata)
            except BaseException:
                models.cache.release(entry)
                raise
            call.add_done_callback(lambda _: models.cache.release(entry))
            return call

        entry = None if again else models.cache.acquire_loaded(model)
        if entry is not None:
            return send(entry)
        models.report(model)
        return _PreparedCall(asyncio.get_running_loop().create_task(models.then(send, model, again, until)))

    def _meet(self, ready: bool) -> None:
        if ready:
            return
        self._regions.system.lost()
        if self._models is not None:
            self._closing = asyncio.get_running_loop().create_task(self._models.cache.close())
            self._models = None


TRANSPORTS[TRANSPORT] = TritonConnection


class _PreparedCall:
    """A call that is sent later: `opening` returns the transport's call. As far as handles use one."""

    def __init__(self, opening: asyncio.Task[Any]) -> None:
        self._opening = opening

    @property
    def _call(self) -> Any:
        opening = self._opening
        return None if not opening.done() or opening.cancelled() or opening.exception() else opening.result()

    @property
    def _now(self) -> Any:
        """The transport's call, or its opening while there is none."""
        return self._call or self._opening

    def __await__(self) -> Generator[Any, None, Any]:
        call = yield from self._opening.__await__()
        return (yield from call.__await__())

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in await self._opening:
            yield message

    async def write(self, request: Any) -> None:
        await (await self._opening).write(request)

    async def done_writing(self) -> None:
        await (await self._opening).done_writing()

    async def initial_metadata(self) -> Any:
        return await (await self._opening).initial_metadata()

    async def trailing_metadata(self) -> Any:
        return await (await self._opening).trailing_metadata()

    async def code(self) -> Any:
        return await (await self._opening).code()

    async def details(self) -> Any:
        return await (await self._opening).details()

    def cancel(self) -> bool:
        return bool(self._now.cancel())

    def cancelled(self) -> bool:
        return bool(self._now.cancelled())

    def done(self) -> bool:
        return bool(self._now.done())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        def opened(_: Any) -> None:
            call = self._call
            if call is None:
                callback(self)
            else:
                call.add_done_callback(callback)

        self._opening.add_done_callback(opened)
