"""Ends the drain of a node: the engine's own drain comes last, because it ends whatever still runs there."""

from __future__ import annotations

from ..model.actions import UpdateNode
from .draft import Draft


def drain_left_nodes(draft: Draft) -> None:
    """Have the engine take everything else from nodes that leave and have no replica any more."""
    holding = {one.node for one in draft.observed.containers if not one.state.has_ended}
    for name, node in draft.leaving.items():
        if node.availability == "drain" or name in holding | draft.busy | draft.unknown or draft.observed.brake:
            continue
        cause = "it leaves, and none of the replicas is there any more"
        action = UpdateNode(target=name, node_id=node.id, version=node.version, availability="drain", cause=cause)
        draft.add(action)
