"""Builds a row for each node: what is there, what is wrong with it, and whether replicas are spread badly. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ..model.nodes import Node, Quorum
from ..model.observed import Observed
from ..model.plan import PendingReplica, Plan
from ..model.text import counted
from ..model.world import ReplicaContainer
from .records.services import NodeStatus, ShownAvailability

CROWD = 2
"""From this many replicas on one node, `status` names the nodes that have room and none."""


def node_rows(observed: Observed, plan: Plan) -> tuple[NodeStatus, ...]:
    """Return one row for each node; none where the engine is one machine."""
    there: dict[str, list[ReplicaContainer]] = {node.name: [] for node in observed.nodes}
    for one in observed.containers:
        if one.node in there and not one.state.has_ended:
            there[one.node].append(one)
    staying: dict[str, list[PendingReplica]] = {node.name: [] for node in observed.nodes}
    for pending in plan.pending:
        if pending.replaces in staying:
            staying[pending.replaces].append(pending)
    crowded = _crowded(observed, there)
    settling = bool(observed.retirements or observed.in_progress or plan.steps)
    used, rows = _used(observed), []
    for node in observed.nodes:
        cards = [gpu.uuid for gpu in observed.gpus if gpu.node == node.name]
        reasons = dict.fromkeys(f"{one.service}: {one.reason}" for one in staying[node.name])
        message = _words(node, len(there[node.name]), list(reasons)) or crowded.get(node.name, "")
        row = NodeStatus(
            name=node.name,
            role="leader" if node.is_leader else "manager" if node.is_manager else "worker",
            state=node.state,
            availability=_availability(node),
            address=node.address,
            labels=node.labels,
            replicas=len(there[node.name]),
            gpus=len(cards),
            gpus_used=len(used.intersection(cards)),
            message=message,
            blocked="" if settling else "; ".join(reasons),
        )
        rows.append(row)
    return tuple(rows)


def edge_differences(observed: Observed) -> Mapping[str, str]:
    """Return, by node, why its HAProxy differs from the others, or that none runs there; "" = it is as they are."""
    edges = observed.routing.edges if observed.routing else {}
    wanted = [one.name for one in observed.nodes if edges and one.state == "ready" and one.availability != "drain"]
    words = "it does not run, so the node takes no requests; `docker node ps {}` says why"
    return {**edges, **{name: words.format(name) for name in wanted if name not in edges}}


def node_notices(observed: Observed) -> Iterator[str]:
    """Yield what is wrong with the nodes together, and which are down."""
    if observed.brake:
        yield observed.brake
    quorum = Quorum.of(observed.nodes)
    if quorum.at_risk:
        yield quorum_words(quorum)
    for node in observed.nodes:
        if node.state == "down" and node.availability != "drain":
            yield f"node {node.name} is down: its replicas go where there is room"


def quorum_words(quorum: Quorum) -> str:
    """Return how many managers there are, and what follows if another one is lost."""
    return (
        f"{quorum.ready} of {quorum.managers} managers are up and {quorum.needed} are needed: without another one "
        "nothing can be changed or moved, and running services are not affected. Bring a manager back, "
        "or `docker node promote` a node"
    )


def _availability(node: Node) -> ShownAvailability:
    if node.availability == "active":
        return "active"
    if node.availability == "drain":
        return "drained"
    return "leaving" if node.is_leaving else "paused"


def _words(node: Node, replicas: int, reasons: Sequence[str]) -> str:
    match node.state, _availability(node):
        case "down", "drained":
            return ""
        case "down", _:
            return "down: its replicas go where there is room"
        case "unknown", _:
            return "the managers do not know its state yet: its replicas are not touched"
        case _, "leaving" if reasons:
            return f"{counted(replicas, 'replica')} left, and no other node has room: {'; '.join(reasons)}"
        case _, "leaving":
            return f"{counted(replicas, 'replica')} left to go elsewhere"
        case _, "drained":
            return f"it may be switched off; `pierhead node activate {node.name}` uses it again"
        case _, "paused":
            return f"nothing new is placed there until `pierhead node activate {node.name}`"
        case _:
            return ""


def _used(observed: Observed) -> set[str]:
    """The GPUs that something holds. A node that takes nothing is listed as a holder of its own."""
    foreign = observed.foreign_gpu_holders
    own = {gpu.uuid for gpu in observed.gpus if foreign.get(gpu.uuid, "").startswith(f"{gpu.node} (")}
    held = {uuid for one in observed.containers if not one.state.has_ended and one.node for uuid in one.gpus}
    return held | (foreign.keys() - own)


def _crowded(observed: Observed, there: Mapping[str, Sequence[ReplicaContainer]]) -> dict[str, str]:
    """What to say of nodes that have room while others are crowded: nothing is moved back automatically."""
    taking = [node.name for node in observed.nodes if node.takes_replicas]
    used = _used(observed)
    free = Counter(gpu.node for gpu in observed.gpus if gpu.uuid not in used)
    fullest = max(taking, key=lambda name: len(there[name]), default="")
    if not fullest or len(there[fullest]) < CROWD:
        return {}
    least = min(len(one.gpus) for one in there[fullest])
    words = (
        f"has room: no replica is here and {len(there[fullest])} are on {fullest}. Nothing is moved back "
        f"automatically: `pierhead node drain {fullest}`, then `pierhead node activate {fullest}`"
    )
    return {name: words for name in taking if not there[name] and free[name] >= least}
