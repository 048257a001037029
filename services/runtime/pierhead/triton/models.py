"""Models that are loaded on demand.

model's id -> loaded here? -- yes -> the call is sent
                   |
                   `- no -> the model is loaded, and perhaps another one unloaded, then the call is sent
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pierhead.calls.clients import Clients
from pierhead.errors import DeadlineExceeded, NoReplica
from pierhead.held import HeldModels
from pierhead.lanes.connection import Connection
from pierhead.metrics import PROCESS
from pierhead.multiplex.cache import Entry, ModelCache
from pierhead.triton.errors import load_error

TRANSPORT = "triton"
"""By its name, pools of Triton servers are found."""

MAX_MODELS: dict[str, int | None] = {}
"""By service: the most models that this process keeps loaded at a replica on demand; None = any number."""


class LoadedModels:
    """The models that this process has loaded at one server."""

    def __init__(self, channel: grpc.aio.Channel, service: str, connection: Connection) -> None:
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._held = HeldModels()
        replicas = Clients.current().pool(service, TRANSPORT).replicas()
        replica = next((each for each in replicas if each.connection is connection), None)
        if replica is None:
            raise NoReplica(f"the replica that was chosen for the call is no longer one of {service}")
        self._replica = replica
        self.cache: ModelCache[LoadedModel] = ModelCache(
            self._load, MAX_MODELS[service], f"triton {service}", PROCESS, self._held
        )

    def report(self, *more: str) -> None:
        """Report to the router which models the replica holds, or will."""
        self._replica.models = self._held.models() | frozenset(more)

    async def then(self, send: Callable[[Entry[LoadedModel]], Any], model: str, again: bool, until: float) -> Any:
        """Send a call once its model is loaded. `again`: although it was known as loaded."""
        try:
            async with asyncio.timeout_at(until):
                entry = await self.cache.acquire(model)
                try:
                    if again and entry.model is not None:
                        await entry.model.load_again()
                except BaseException:
                    self.cache.release(entry)
                    raise
        except TimeoutError:
            raise DeadlineExceeded(f"model {model} was not loaded in time") from None
        finally:
            self.report()
        return send(entry)

    async def _load(self, model: str) -> LoadedModel:
        return LoadedModel(self, model, loaded_here=await self.load(model))

    async def load(self, model: str) -> bool:
        """Whether it had to be loaded."""
        try:
            if (await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model))).ready:
                return False
            await self._stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name=model))
        except grpc.aio.AioRpcError as error:
            found = load_error(error.details() or "")
            if found is None:
                raise
            raise found from error
        return True

    async def evict(self, model: str, *, unload: bool) -> None:
        """It loses its place."""
        self.report()
        if unload and model in self.cache.entries:  # else the cache was closed, with the connection or the process
            await self._stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name=model))


class LoadedModel:
    """A loaded model, as the cache sees it."""

    def __init__(self, models: LoadedModels, name: str, *, loaded_here: bool) -> None:
        """`loaded_here`: by this process. Other models are not its to unload."""
        self._models = models
        self._name = name
        self._loaded_here = loaded_here
        self._loading = asyncio.Lock()

    async def load_again(self) -> None:
        """Another process has unloaded it: load it, once for all calls that have met this."""
        async with self._loading:
            if await self._models.load(self._name):
                self._loaded_here = True

    async def aclose(self) -> None:
        """The cache calls it."""
        await self._models.evict(self._name, unload=self._loaded_here)
