"""What the controller needs of the HTTP and gRPC edge. `haproxy.py` is the real one, tests/fakes/fake_haproxy.py a fake
socket server; both pass tests/contract/test_routing_contract.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ..model.actions import (
    AddServer,
    DeleteServer,
    SetServerState,
    SetServerWeight,
    SetWaitingRoom,
    ShutdownSessions,
    WriteRouting,
)
from ..model.spec import ServiceSpec
from ..model.world import RoutingState

RoutingAction = (
    AddServer | SetServerState | SetServerWeight | ShutdownSessions | DeleteServer | SetWaitingRoom | WriteRouting
)


class Router(Protocol):
    """The edge as the loop sees it."""

    async def observe(self) -> RoutingState | None:
        """One snapshot; None while HAProxy does not answer (it is being restarted)."""
        ...

    async def perform(self, action: RoutingAction, spec: ServiceSpec | None) -> None:
        """Carry out one action; "already there" and "already gone" are success. Raises RoutingError and its kinds."""
        ...

    def routing_hash(self, services: Collection[ServiceSpec]) -> str:
        """Hash of the configuration that these services need: equal to `RoutingState.routing_hash` = nothing to do.

        Pure. Does not depend on replicas, only on routes and per-backend settings.
        """
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
