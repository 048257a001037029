"""The interface of the HTTP and gRPC router. `haproxy.py` implements it.

tests/contract/test_router_contract.py holds it (with a real HAProxy) and the fake of the controller's tests to the
same promises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from ..model.actions import (
    AddServer,
    DeleteServer,
    SetServerState,
    SetServerWeight,
    SetWaitingRoom,
    ShutdownSessions,
    WriteKeys,
    WriteRouting,
)
from ..model.spec import ServiceSpec
from ..model.world import RoutingState

ServerAction = AddServer | SetServerState | SetServerWeight | ShutdownSessions | DeleteServer
ProcessAction = ServerAction | SetWaitingRoom | WriteKeys
"""What the runtime API of one HAProxy does."""
RoutingAction = ProcessAction | WriteRouting


class Router(Protocol):
    """The edge."""

    async def observe(self) -> RoutingState:
        """One snapshot. Raises RoutingUnreachable while HAProxy does not answer (it is being restarted), RoutingError
        when its answers cannot be read.
        """
        ...

    async def http_is_silent(self) -> bool:
        """Whether HAProxy's HTTP port accepts or drops a connection and sends no answer. A port that refuses it is not
        silent: no process is there, and Docker starts it.
        """
        ...

    async def perform(self, action: RoutingAction) -> None:
        """Carry out one action; "already there" and "already gone" are success. Raises RoutingError and its kinds."""
        ...

    async def key_ages(self) -> Mapping[str, float]:
        """How many seconds ago keys of clients were last used, by name, for those of the last minutes. Raises as
        `observe`.
        """
        ...

    def routing_hash(self, services: Collection[ServiceSpec]) -> str:
        """Hash of the configuration that these services need: of their routes and settings, not of their replicas.

        HAProxy runs that configuration where it equals `RoutingState.routing_hash`.
        """
        ...
