"""Among which nodes Swarm is to choose for one replica: those that have the fewest replicas of its service. Pure.

Each replica is a service of its own, so neither Swarm's own spreading nor its preferences and bounds for each node see
more than one task. The nodes left are written as constraints, which are removed once the replica has its node: where a
lost node's replicas go is for Swarm to choose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...model.nodes import Node, fits, value_of
from ...model.text import whole_number
from ..names import Json
from .nodes import nodes
from .reader import ENDED, SwarmListing, gpus_of
from .service_spec import LIMIT_LABEL

_RUNS = ("ready", "running")
"""Desired states of tasks that run or are about to."""


@dataclass(frozen=True, slots=True)
class Narrowing:
    """Constraints in addition to those of the compose file."""

    bound: tuple[str, ...] = ()
    """Against nodes that have max_replicas_per_node replicas of the service."""
    preference: tuple[str, ...] = ()
    """Against nodes that have more of them than others; without these it may go where there is room."""


EVERY_NODE = Narrowing()


def narrowing(spec: Json, listing: SwarmListing) -> Narrowing:
    """The constraints for a replica that is to be started, by the spec of its service."""
    task = spec["TaskTemplate"]
    placement = task.get("Placement") or {}
    placed = [one for one in listing.tasks if one.get("NodeID") and _runs(one)]
    ours = Counter(one["NodeID"] for one in placed if _own(one["Spec"].get("ContainerSpec") or {}) == _own(spec))
    constraints, limit = placement.get("Constraints") or (), whole_number(spec["Labels"].get(LIMIT_LABEL, ""))
    usable = [node for node in nodes(listing.nodes) if node.takes_replicas and fits(node, constraints)]
    full = [node.id for node in usable if limit and ours[node.id] >= limit]
    free, wanted = _free_gpus(listing.nodes, placed), _reserved_gpus(task)
    room = [node for node in usable if node.id not in full and free[node.id] >= wanted]
    best = {node.id for node in _emptiest(room, ours, placement.get("Preferences") or ())}
    return Narrowing(_against(full), _against(node.id for node in room if node.id not in best))


def is_undecided(spec: Json, listing: SwarmListing) -> bool:
    """Whether Swarm still looks for the node of another replica of the service: it counts where that one goes."""
    wanted = [one for one in listing.services if one["Spec"]["Mode"]["Replicated"].get("Replicas")]
    ours = {one["ID"] for one in wanted if _own(one["Spec"]) == _own(spec)}
    return any(has_node([task for task in listing.tasks if task["ServiceID"] == one]) is None for one in ours)


def has_node(tasks: Collection[Json]) -> bool | None:
    """Whether Swarm has found a node for the newest of a service's tasks; None = it has not looked yet."""
    wanted = [task for task in tasks if task["DesiredState"] in _RUNS]
    if not wanted:
        return None
    newest = max(wanted, key=lambda task: str(task["CreatedAt"]))
    if newest.get("NodeID"):
        return True
    return False if newest["Status"].get("Err") else None


# ---------------------------------------------------------------------------------------------------------------- parts


def _emptiest(room: Sequence[Node], ours: Mapping[str, int], preferences: Iterable[Json]) -> list[Node]:
    """The nodes with the fewest replicas: by the preferences' labels, the first one first, and then by themselves."""
    left, keys = list(room), list[str]()
    for preference in preferences:
        keys.append(str((preference.get("Spread") or {}).get("SpreadDescriptor", "")))
        groups = {node.id: tuple(value_of(node, key) for key in keys) for node in room}
        counts: Counter[tuple[str | None, ...]] = Counter()
        for node in room:
            counts[groups[node.id]] += ours.get(node.id, 0)
        fewest = min((counts[groups[node.id]] for node in left), default=0)
        left = [node for node in left if counts[groups[node.id]] == fewest]
    fewest = min((ours.get(node.id, 0) for node in left), default=0)
    return [node for node in left if ours.get(node.id, 0) == fewest]


def _against(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"node.id!={one}" for one in ids)


def _runs(task: Json) -> bool:
    return task["DesiredState"] in _RUNS and task["Status"]["State"] not in ENDED


def _own(labelled: Json) -> tuple[str | None, str | None]:
    labels = labelled.get("Labels") or {}
    return labels.get("pierhead.project"), labels.get("pierhead.service")


def _reserved_gpus(task: Json) -> int:
    reserved = ((task.get("Resources") or {}).get("Reservations") or {}).get("GenericResources") or ()
    return sum(int((one.get("DiscreteResourceSpec") or {}).get("Value") or 0) for one in reserved)


def _free_gpus(listed: Iterable[Json], placed: Iterable[Json]) -> Counter[str]:
    """By node."""
    free = Counter({node["ID"]: len(gpus_of((node.get("Description") or {}).get("Resources"))) for node in listed})
    for one in placed:
        free[one["NodeID"]] -= len(gpus_of(one))
    return free
