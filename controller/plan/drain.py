"""The drain of a node: what it will do, and its end. The engine's own drain is last: it ends everything there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..model.actions import UpdateNode
from ..model.nodes import fits
from ..model.observed import Observed
from ..model.spec import ServiceSpec
from .draft import Draft
from .placement import GpuBudget


def drain_left_nodes(draft: Draft) -> None:
    """Make the engine remove everything else from leaving nodes without a replica."""
    holding = {one.node for one in draft.observed.containers if not one.state.has_ended}
    for name, node in draft.leaving.items():
        if node.availability == "drain" or name in holding | draft.busy | draft.unknown or draft.observed.brake:
            continue
        cause = "it leaves, and no replica is left on it"
        action = UpdateNode(target=name, node_id=node.id, version=node.version, availability="drain", cause=cause)
        draft.add(action)


def without_room(observed: Observed, services: Mapping[str, ServiceSpec], name: str, now: float) -> Mapping[str, int]:
    """By service: how many of a node's replicas would find no place on the others now, as far as that is known here."""
    others = [node for node in observed.nodes if node.takes_replicas and node.name != name]
    taken = {gpu.uuid: name for gpu in observed.gpus if gpu.node == name}
    budget = GpuBudget.of(replace(observed, foreign_gpu_holders={**observed.foreign_gpu_holders, **taken}), now).trial()
    stuck: Counter[str] = Counter()
    for one in observed.containers:
        spec = services.get(one.service)
        if spec is None or one.node != name or one.state.has_ended:
            continue
        has_node = any(fits(node, spec.constraints) for node in others)
        if not has_node or (spec.gpu is not None and not budget.place(one.service, spec.gpu)):
            stuck[one.service] += 1
    return stuck
