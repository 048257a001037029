"""How many replicas of which version there may be while versions change, and how many this machine has room for."""

from __future__ import annotations

from controller.model import ServiceSpec
from controller.planning.draft import Draft
from controller.planning.outlook import ServiceOutlook
from controller.shares import Bounds, bounds


def bounds_of(draft: Draft, outlook: ServiceOutlook, *, has_place: bool = True) -> Bounds | None:
    """How many replicas of which version there may be now; None when versions do not change. Before anything starts."""
    spec, goal = outlook.spec, outlook.goal
    if spec is None or not (goal.keep or any(replica.outdated for replica in outlook.alive())):
        return None
    outlook.has_place = has_place
    if has_place:
        outlook.room = _room(draft, outlook, goal.spec or spec)
        kept = _room(draft, outlook, goal.keep_spec) if goal.keep_spec else outlook.room
        outlook.reachable = min(outlook.target, max(outlook.room, kept))
    return bounds(
        outlook.target,
        spec.rollout,
        on_trial=goal.keep is not None,
        room=outlook.room,
        reachable=outlook.reachable,
        has_place=has_place,
    )


def _room(draft: Draft, outlook: ServiceOutlook, spec: ServiceSpec) -> int:
    """How many replicas of the service fit on this machine, those that are there included; no more than are needed."""
    present = outlook.here() + sum(outlook.held.values())
    room = max(present, outlook.target + spec.rollout.max_surge)
    if spec.gpu is not None and spec.gpu.count:
        room = present + draft.gpus.room(outlook.name, spec.gpu, room - present)
    return room if spec.max_replicas_per_node is None else min(room, spec.max_replicas_per_node)
