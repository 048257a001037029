"""The drain of a node: what it will do, and its end. The engine's own drain is last: it ends whatever runs there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..model.actions import UpdateNode
from ..model.nodes import Node
from ..model.observed import Observed
from ..model.spec import ServiceSpec
from .draft import Draft
from .placement import GpuBudget


def drain_left_nodes(draft: Draft) -> None:
    """Have the engine take everything else from nodes that leave and have no replica any more."""
    holding = {one.node for one in draft.observed.containers if not one.state.has_ended}
    for name, node in draft.leaving.items():
        if node.availability == "drain" or name in holding | draft.busy | draft.unknown or draft.observed.brake:
            continue
        cause = "it leaves, and none of the replicas is there any more"
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
        has_node = any(not unmet_constraint(spec, node) for node in others)
        needs_gpus = spec.gpu is not None and spec.gpu.count > 0
        if not has_node or (needs_gpus and spec.gpu and not budget.place(one.service, spec.gpu)):
            stuck[one.service] += 1
    return stuck


_OF_A_LABEL = re.compile(r"\s*node\.labels\.(?P<key>\S+?)\s*(?P<sign>==|!=)\s*(?P<value>.*?)\s*")


def unmet_constraint(spec: ServiceSpec, node: Node) -> str:
    """The first placement constraint of a service that a node's labels do not meet; "" = they meet all."""
    for constraint in (spec.container.get("Placement") or {}).get("Constraints") or ():
        found = _OF_A_LABEL.fullmatch(constraint)
        if found and (node.labels.get(found["key"], "") == found["value"]) != (found["sign"] == "=="):
            return str(constraint)
    return ""
