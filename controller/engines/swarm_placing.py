"""Among which nodes Swarm is to choose for one replica: those that have the fewest replicas of its service. Pure.

Each replica is a service of its own, so neither Swarm's own spreading nor its preferences and bounds for each node see
more than one task. The nodes left are written as constraints, which are removed once the replica has its node: where a
lost node's replicas go is for Swarm to choose.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .swarm_spec import GPU_KIND, LIMIT_LABEL

Json = Mapping[str, Any]
_CONSTRAINT = re.compile(r"\s*(?P<key>[A-Za-z0-9_.-]+)\s*(?P<operator>==|!=)\s*(?P<value>.*?)\s*")
_RUNS = ("ready", "running")
"""Desired states of tasks that run or are about to."""
_ENDED = ("complete", "failed", "rejected", "shutdown", "orphaned", "remove")


@dataclass(frozen=True, slots=True)
class Narrowing:
    """Constraints beside those of the compose file."""

    bound: tuple[str, ...] = ()
    """Against nodes that have max_replicas_per_node replicas of the service."""
    preference: tuple[str, ...] = ()
    """Against nodes that have more of them than others; without these it may go where there is room."""


EVERY_NODE = Narrowing()


def narrowing(spec: Json, nodes: Iterable[Json], tasks: Iterable[Json]) -> Narrowing:
    """The constraints for a replica that is to be started, by the spec of its service, and all nodes and tasks."""
    task, labels = spec["TaskTemplate"], spec["Labels"]
    placement = task.get("Placement") or {}
    placed = [one for one in tasks if one.get("NodeID") and _runs(one)]
    ours = Counter(one["NodeID"] for one in placed if _service_of(one) == _own_service(labels))
    usable = [node for node in nodes if _takes_tasks(node) and fits(placement.get("Constraints") or (), node)]
    limit = int(labels.get(LIMIT_LABEL) or 0)
    full = [node["ID"] for node in usable if limit and ours[node["ID"]] >= limit]
    wanted = sum(one.get("DiscreteResourceSpec", {}).get("Value", 0) for one in _reserved(task))
    room = [node for node in usable if node["ID"] not in full and _free_gpus(node, placed) >= wanted]
    best = {node["ID"] for node in _emptiest(room, ours, placement.get("Preferences") or ())}
    return Narrowing(_against(full), _against(node["ID"] for node in room if node["ID"] not in best))


def fits(constraints: Iterable[str], node: Json) -> bool:
    """Whether a node fulfils constraints, as far as they are about its name, id, role, platform or labels."""
    found = [_CONSTRAINT.fullmatch(one) for one in constraints]
    known = [(match, _value(node, match["key"])) for match in found if match]
    return all(
        (value.lower() == match["value"].lower()) == (match["operator"] == "==")
        for match, value in known
        if value is not None
    )


def waits_in_vain(tasks: Collection[Json]) -> bool | None:
    """Whether Swarm has found no node for the newest of a service's tasks; None = it has not looked yet."""
    wanted = [task for task in tasks if task["DesiredState"] in _RUNS]
    if not wanted:
        return None
    newest = max(wanted, key=lambda task: str(task["CreatedAt"]))
    if newest.get("NodeID"):
        return False
    return True if newest["Status"].get("Err") else None


# ---------------------------------------------------------------------------------------------------------------- parts


def _emptiest(room: Sequence[Json], ours: Mapping[str, int], preferences: Iterable[Json]) -> list[Json]:
    """The nodes with the fewest replicas: by the preferences' labels, the first one first, and then by themselves."""
    left, keys = list(room), []
    for preference in preferences:
        keys.append(str((preference.get("Spread") or {}).get("SpreadDescriptor", "")))
        groups = {node["ID"]: tuple(_value(node, key) for key in keys) for node in room}
        counts: Counter[tuple[str | None, ...]] = Counter()
        for node in room:
            counts[groups[node["ID"]]] += ours.get(node["ID"], 0)
        fewest = min((counts[groups[node["ID"]]] for node in left), default=0)
        left = [node for node in left if counts[groups[node["ID"]]] == fewest]
    fewest = min((ours.get(node["ID"], 0) for node in left), default=0)
    return [node for node in left if ours.get(node["ID"], 0) == fewest]


def _against(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"node.id!={one}" for one in ids)


def _takes_tasks(node: Json) -> bool:
    return bool(node["Status"].get("State") == "ready" and node["Spec"].get("Availability") == "active")


def _value(node: Json, key: str) -> str | None:
    """What a constraint compares; None = it is left to Swarm."""
    description = node.get("Description") or {}
    if key.startswith("node.labels."):
        return str((node["Spec"].get("Labels") or {}).get(key.removeprefix("node.labels."), ""))
    if key.startswith("engine.labels."):
        return str(((description.get("Engine") or {}).get("Labels") or {}).get(key.removeprefix("engine.labels."), ""))
    platform = description.get("Platform") or {}
    known = {
        "node.id": node["ID"],
        "node.hostname": description.get("Hostname"),
        "node.role": node["Spec"].get("Role"),
        "node.platform.os": platform.get("OS"),
    }
    return known.get(key)


def _runs(task: Json) -> bool:
    return task["DesiredState"] in _RUNS and task["Status"]["State"] not in _ENDED


def _service_of(task: Json) -> tuple[str | None, str | None]:
    return _own_service((task["Spec"].get("ContainerSpec") or {}).get("Labels") or {})


def _own_service(labels: Mapping[str, str]) -> tuple[str | None, str | None]:
    return labels.get("pierhead.project"), labels.get("pierhead.service")


def _reserved(task: Json) -> Sequence[Json]:
    return ((task.get("Resources") or {}).get("Reservations") or {}).get("GenericResources") or ()


def _free_gpus(node: Json, placed: Iterable[Json]) -> int:
    resources = (node.get("Description") or {}).get("Resources") or {}
    taken = sum(_named(one.get("GenericResources")) for one in placed if one["NodeID"] == node["ID"])
    return _named(resources.get("GenericResources")) - taken


def _named(resources: Sequence[Json] | None) -> int:
    return sum((one.get("NamedResourceSpec") or {}).get("Kind") == GPU_KIND for one in resources or ())
