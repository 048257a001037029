"""Discovery for the processes of one application, as the controller serves it to containers, with the shared store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from pierhead.calls.replica import ReplicaListing
from pierhead.discovery.v1 import discovery_pb2, discovery_pb2_grpc
from pierhead.store.memory import MemoryStore
from pierhead.store.served import add_store
from pierhead.tasks import next_change, wake_all


class LocalDiscovery(discovery_pb2_grpc.DiscoveryServicer):
    """Tells callers where the replicas of each service are."""

    def __init__(self, services: Sequence[str]) -> None:
        self._known = sorted(services)
        self._states: dict[str, discovery_pb2.ServiceEndpoints] = {}
        self._changes: list[asyncio.Future[None]] = []
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen, on loopback."""
        self._server = server = grpc.aio.server()
        discovery_pb2_grpc.add_DiscoveryServicer_to_server(self, server)
        add_store(MemoryStore(), server)
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

    async def stop(self) -> None:
        """End all watches."""
        if self._server is not None:
            await self._server.stop(None)

    def update(self, service: str, listing: ReplicaListing) -> None:
        """Tell callers of a service where its replicas are from now on."""
        former = self._states.get(service)
        self._states[service] = discovery_pb2.ServiceEndpoints(
            service=service,
            generation=former.generation + 1 if former else 1,
            epoch=1,
            max_queued_requests=listing.max_queued_requests,
            policy=listing.policy or "",
            policy_kwargs=listing.policy_kwargs,
            endpoints=[
                discovery_pb2.Endpoint(
                    replica=each.name,
                    address=each.address,
                    state=discovery_pb2.Endpoint.READY,
                    max_ongoing_requests=each.max_ongoing_requests,
                )
                for each in listing.endpoints
            ],
        )
        wake_all(self._changes)

    async def Watch(
        self, request: discovery_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[discovery_pb2.ServiceEndpoints]:
        """Send the whole state at once, then at every change, until the caller disconnects."""
        sent: dict[str, discovery_pb2.ServiceEndpoints] = {}
        while True:
            changed = next_change(self._changes)
            for name in request.services:
                state = self._state(name)
                if sent.get(name) != state:
                    sent[name] = state
                    yield state
            await changed

    def _state(self, service: str) -> discovery_pb2.ServiceEndpoints:
        if service in self._known:
            return self._states.get(service) or discovery_pb2.ServiceEndpoints(service=service, epoch=1)
        return discovery_pb2.ServiceEndpoints(service=service, epoch=1, unknown=True, known_services=self._known)
