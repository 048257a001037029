"""What the controller needs of the HTTP and gRPC edge: the `Router` protocol. `haproxy.py` implements it.

tests/contract/test_routing_contract.py checks the implementation against the real HAProxy and against a fake one.
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

ServerAction = AddServer | SetServerState | SetServerWeight | ShutdownSessions | DeleteServer
RoutingAction = ServerAction | SetWaitingRoom | WriteRouting


class Router(Protocol):
    """The edge as the loop sees it."""

    async def observe(self) -> RoutingState | None:
        """One snapshot; None while HAProxy does not answer (it is being restarted).

        Raises RoutingError when HAProxy answers and its answers cannot be read.
        """
        ...

    async def http_is_silent(self) -> bool:
        """Whether HAProxy's HTTP port takes a connection, or drops it, and no answer comes. A port that refuses is not
        silent: the process is not there, and Docker starts it.
        """
        ...

    async def perform(self, action: RoutingAction) -> None:
        """Carry out one action; "already there" and "already gone" are success. Raises RoutingError and its kinds."""
        ...

    def routing_hash(self, services: Collection[ServiceSpec]) -> str:
        """Hash of the configuration that these services need. Where it equals `RoutingState.routing_hash`, HAProxy runs
        that configuration already.

        It depends on routes and settings of the services, not on their replicas.
        """
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
