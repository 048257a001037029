"""The connection from `pierhead.triton` to one server, when it sends a call, and the models that it loads on demand.

a call that loads its model on demand -> once the model is loaded, and perhaps another one unloaded
a request with inputs in GPU memory   -> once they are registered
any other call                        -> at once
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pierhead.calls.clients import Clients
from pierhead.errors import DeadlineExceeded, NoReplica
from pierhead.held import HeldModels
from pierhead.lanes.client import TRANSPORTS
from pierhead.lanes.connection import FOREIGN_CHANNEL_OPTIONS, GrpcConnection, Method
from pierhead.metrics import PROCESS
from pierhead.multiplex.cache import Entry, ModelCache
from pierhead.request import MODEL_KEY, TRACEPARENT_KEY
from pierhead.triton.errors import load_error
from pierhead.triton.messages import LargeRequest
from pierhead.triton.regions import TritonRegions

TRANSPORT = "triton"
"""By its name, pools of Triton servers are found."""

LOAD_KEY = "pierhead-triton-load"
"""Metadata of a call whose model is to be loaded: "1", or "again" where the server turned out not to have it."""

MAX_MODELS: dict[str, int | None] = {}
"""By service: the most models that this process keeps loaded at a replica on demand; None = any number."""


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

        def begin(message: Any) -> Any:
            return GrpcConnection.open(self, method, message, until - self._loop.time(), traced, compression)

        async def begin_registered(message: Any) -> Any:
            await request.registered(until)
            return begin(message)

        def send() -> Any:
            if not isinstance(request, LargeRequest):
                return begin(request)
            message = request.message(self._regions)
            return _PreparedCall(begin_registered(message)) if request.on_gpu else begin(message)

        if LOAD_KEY not in pairs:
            return send()
        if self._models is None:
            self._models = LoadedModels(self._stub, self._called, self)
        return self._models.send(pairs[MODEL_KEY], send, again=pairs[LOAD_KEY] == "again", until=until)

    async def close(self) -> None:
        """Unregister its memory, and close the channel. Models stay loaded: other processes use them, too."""
        if self._models is not None:
            await self._models.cache.close()
        await self._regions.close()
        await super().close()

    def _meet(self, ready: bool) -> None:
        if ready:
            return
        self._regions.lost()
        if self._models is not None:
            self._closing = self._loop.create_task(self._models.cache.close())
            self._models = None


TRANSPORTS[TRANSPORT] = TritonConnection


class LoadedModels:
    """The models that this process has loaded at one server."""

    def __init__(self, stub: Any, service: str, connection: TritonConnection) -> None:
        self.stub, self._held = stub, HeldModels()
        replicas = Clients.current().pool(service, TRANSPORT).replicas()
        replica = next((each for each in replicas if each.connection is connection), None)
        if replica is None:
            raise NoReplica(f"the replica that was chosen for the call is no longer one of {service}")
        self._replica = replica
        self.cache: ModelCache[LoadedModel] = ModelCache(
            self._load, MAX_MODELS[service], f"triton {service}", PROCESS, self._held
        )

    def send(self, name: str, send: Callable[[], Any], *, again: bool, until: float) -> Any:
        """Begin a call for a model, which is loaded first if necessary, and stays while the call is in flight.
        `again`: also where it was known as loaded.
        """
        entry = None if again else self.cache.acquire_loaded(name)
        if entry is not None:
            return self._send(entry, send)
        self.report(name)
        return _PreparedCall(self._load_and_send(name, send, again, until))

    def report(self, *more: str) -> None:
        """Report to the router which models the replica holds, or will."""
        self._replica.models = self._held.models() | frozenset(more)

    def _send(self, entry: Entry[LoadedModel], send: Callable[[], Any]) -> Any:
        try:
            call = send()
        except BaseException:
            self.cache.release(entry)
            raise
        call.add_done_callback(lambda _: self.cache.release(entry))
        return call

    async def _load_and_send(self, name: str, send: Callable[[], Any], again: bool, until: float) -> Any:
        try:
            async with asyncio.timeout_at(until):
                entry = await self.cache.acquire(name)
                try:
                    if again and entry.model is not None:
                        await entry.model.load()
                except BaseException:
                    self.cache.release(entry)
                    raise
        except TimeoutError:
            raise DeadlineExceeded(f"model {name} was not loaded in time") from None
        finally:
            self.report()
        return self._send(entry, send)

    async def _load(self, name: str) -> LoadedModel:
        model = LoadedModel(self, name)
        await model.load()
        return model


class LoadedModel:
    """A loaded model, as the cache sees it."""

    def __init__(self, models: LoadedModels, name: str) -> None:
        self._models, self._name = models, name
        self._is_ours = False
        """Loaded by this process. Other models are not its to unload."""
        self._loading = asyncio.Lock()
        """One load for all calls that have met that another process has unloaded it."""

    async def load(self) -> None:
        """Load it where the server does not have it."""
        stub = self._models.stub
        async with self._loading:
            try:
                if not (await stub.ModelReady(service_pb2.ModelReadyRequest(name=self._name))).ready:
                    await stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name=self._name))
                    self._is_ours = True
            except grpc.aio.AioRpcError as error:
                found = load_error(error.details() or "")
                if found is None:
                    raise
                raise found from error

    async def aclose(self) -> None:
        """It loses its place in the cache."""
        self._models.report()
        if self._is_ours and self._name in self._models.cache.entries:  # else the cache was closed, with the connection
            request = service_pb2.RepositoryModelUnloadRequest(model_name=self._name)
            await self._models.stub.RepositoryModelUnload(request)


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
