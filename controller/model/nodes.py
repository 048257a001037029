"""The nodes of an engine that has several: which of them a replica may be on, how many managers a decision needs.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

LEAVING_LABEL = "pierhead.leaving"
"""A label of the engine's node: an operator wants it without replicas."""
LEAVING, LEAVING_AT_ONCE = "1", "force"
"""Its values. At once: also the replicas for which no other node has room."""

NodeState = Literal["ready", "down", "unknown"]
"""Unknown: its manager has changed and has not heard of it yet; what was known of it counts."""
Availability = Literal["active", "pause", "drain"]
"""Whether the engine places tasks there; with "drain" it has also moved those that were there."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the engine."""

    name: str
    id: str = ""
    is_manager: bool = False
    is_leader: bool = False
    state: NodeState = "ready"
    availability: Availability = "active"
    labels: Mapping[str, str] = field(default_factory=dict)
    """The engine's, which placement constraints name as node.labels.<key>."""
    address: str = ""
    version: int = 0
    """The engine's number for what the node is now; each change of it gives another one."""

    @property
    def is_leaving(self) -> bool:
        """Whether an operator wants it without replicas. Not where the engine places some there."""
        return LEAVING_LABEL in self.labels and self.availability != "active"

    @property
    def leaves_at_once(self) -> bool:
        """Whether replicas for which no other node has room go as well."""
        return self.is_leaving and self.labels[LEAVING_LABEL] == LEAVING_AT_ONCE

    @property
    def takes_replicas(self) -> bool:
        """Whether the engine may place replicas there."""
        return self.state == "ready" and self.availability == "active"


@dataclass(frozen=True, slots=True)
class Quorum:
    """The managers: how many there are, how many are not down, and how many a decision needs."""

    managers: int
    ready: int

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Quorum:
        """Count the managers of these nodes."""
        managers = [node for node in nodes if node.is_manager]
        return cls(len(managers), sum(node.state != "down" for node in managers))

    @property
    def needed(self) -> int:
        """The majority."""
        return self.managers // 2 + 1

    @property
    def at_risk(self) -> bool:
        """Whether a manager is down, and without another one nothing can be changed."""
        return self.ready < self.managers and self.ready <= self.needed


# ----------------------------------------------------------------------------------------------------
# Placement constraints, as far as the planner has to know which nodes a replica may be on.


_CONSTRAINT = re.compile(r"\s*(?P<key>[A-Za-z0-9_.-]+)\s*(?P<operator>==|!=)\s*(?P<value>.*?)\s*")
LABEL = "node.labels."


def unmet(node: Node, constraints: Iterable[str]) -> str:
    """The first constraint about name, id, role or labels that a node does not fulfil; "" = it fulfils all of these.
    Other ones are left to the engine.
    """
    for constraint in constraints:
        match = _CONSTRAINT.fullmatch(constraint)
        value = value_of(node, match["key"]) if match else None
        if match and value is not None and (value.lower() == match["value"].lower()) != (match["operator"] == "=="):
            return constraint
    return ""


def fits(node: Node, constraints: Iterable[str]) -> bool:
    """Whether a node fulfils constraints, as far as `unmet` knows."""
    return not unmet(node, constraints)


def value_of(node: Node, key: str) -> str | None:
    """What a constraint or a preference of that key looks at; None = it is not known here."""
    if key.startswith(LABEL):
        return node.labels.get(key.removeprefix(LABEL), "")
    known = {"node.id": node.id, "node.hostname": node.name, "node.role": "manager" if node.is_manager else "worker"}
    return known.get(key)
