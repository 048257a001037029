"""A Swarm's nodes: read from what a manager lists, and how one is changed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...engines.base import EngineEvent
from ...model.actions import UpdateNode
from ...model.nodes import Availability, Node, NodeState
from ..names import Json, node_address, node_name

_STATES: Mapping[str, NodeState] = {"ready": "ready", "down": "down"}
"""Every other word says that the manager does not know: after a change of leader, or while a node looks for one."""
_AVAILABILITIES: Mapping[str, Availability] = {"pause": "pause", "drain": "drain"}


def nodes(listed: Iterable[Json]) -> tuple[Node, ...]:
    """The nodes, by name."""
    return tuple(sorted(map(_node, listed), key=lambda node: (node.name, node.id)))


def _node(raw: Json) -> Node:
    spec, status, manager = (raw.get(part) or {} for part in ("Spec", "Status", "ManagerStatus"))
    return Node(
        name=node_name(raw),
        id=raw["ID"],
        is_manager=spec.get("Role") == "manager",
        is_leader=bool(manager.get("Leader")),
        state=_STATES.get(str(status.get("State")), "unknown"),
        availability=_AVAILABILITIES.get(str(spec.get("Availability")), "active"),
        labels=dict(spec.get("Labels") or {}),
        address=node_address(raw),
        version=int((raw.get("Version") or {}).get("Index") or 0),
    )


def node_changes(before: Iterable[Node], after: Iterable[Node]) -> list[EngineEvent]:
    """The events between two readings of the nodes; a node that is gone has changed, too."""
    old, new = ({node.id: node for node in nodes} for nodes in (before, after))
    names = {**old, **new}
    return [EngineEvent("node", key, node.name) for key, node in names.items() if old.get(key) != new.get(key)]


def change_node(action: UpdateNode, spec: dict[str, Any]) -> bool:
    """Change a node's spec; return whether that is another one than before."""
    before = spec.get("Availability"), dict(spec.get("Labels") or {})
    labels = dict(before[1])
    for key, value in action.labels:
        if value is None:
            labels.pop(key, None)
        else:
            labels[key] = value
    spec["Availability"], spec["Labels"] = action.availability or before[0], labels
    return before != (spec["Availability"], labels)


def holds_replicas(tasks: Iterable[Json]) -> list[str]:
    """The names of the replicas among these tasks, whichever project they are of."""
    labels = ((task["Spec"].get("ContainerSpec") or {}).get("Labels") or {} for task in tasks)
    return sorted({one["pierhead.replica"] for one in labels if "pierhead.replica" in one})
