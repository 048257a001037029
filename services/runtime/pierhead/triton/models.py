"""Models that are loaded on demand, in a model cache of ours for each server.

model's id -> loaded here? -- yes -> the call is sent
                   |
                   `- no -> the model is loaded, and perhaps another one unloaded, then the call is sent
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

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

    def __init__(self, stub: Any, service: str, connection: Connection) -> None:
        self.stub = stub
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

    async def acquire(self, model: str, again: bool, until: float) -> Entry[LoadedModel]:
        """The cache's entry, once the model is loaded. `again`: although it was known as loaded."""
        try:
            async with asyncio.timeout_at(until):
                entry = await self.cache.acquire(model)
                try:
                    if again and entry.model is not None:
                        await entry.model.load()
                except BaseException:
                    self.cache.release(entry)
                    raise
        except TimeoutError:
            raise DeadlineExceeded(f"model {model} was not loaded in time") from None
        finally:
            self.report()
        return entry

    async def _load(self, name: str) -> LoadedModel:
        model = LoadedModel(self, name)
        await model.load()
        return model


class LoadedModel:
    """A loaded model, as the cache sees it."""

    def __init__(self, models: LoadedModels, name: str) -> None:
        self._models = models
        self._name = name
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
