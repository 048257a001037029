"""What the REST API changes at the nodes of an engine that has several. `Boundaries` hand in the commands of such an
engine; one machine has no nodes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

from ..errors import InvalidRequest
from ..model.actions import UpdateNode
from ..model.nodes import Node
from ..model.observed import Observed
from ..model.plan import Outcome
from ..model.spec import ServiceSpec


class NodeCommands(Protocol):
    """Each command returns what will happen, in words. Raises InvalidRequest, NotYet, EngineError, ControllerError."""

    def known(self, name: str) -> Node:
        """The node of that name, or id."""
        ...

    async def drain(self, name: str, *, at_once: bool = False) -> str:
        """Move a node's replicas elsewhere. `at_once`: also those for which no other node has room."""
        ...

    async def activate(self, name: str) -> str:
        """Use a node again."""
        ...

    async def label(self, name: str, labels: Mapping[str, str | None]) -> str:
        """Set a node's labels; None takes one away."""
        ...


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What commands on nodes are made of."""

    seen: Callable[[], Observed]
    """The newest snapshot."""
    services: Callable[[], Mapping[str, ServiceSpec]]
    """Of the compose files."""
    perform: Callable[[UpdateNode], Awaitable[None]]
    """Carries an action out."""
    report: Callable[[Outcome], None]
    look_again: Callable[[], Awaitable[None]]
    clock: Callable[[], float]


class NoNodes:
    """The commands on one machine: each is refused."""

    def __init__(self, parts: NodeParts) -> None:
        pass

    def known(self, name: str) -> NoReturn:
        """Raises InvalidRequest."""
        raise InvalidRequest(f"there is no node {name!r}: this stack runs on one machine")

    async def _refuse(self, name: str, *_: object, **__: object) -> NoReturn:
        self.known(name)

    drain = activate = label = _refuse
