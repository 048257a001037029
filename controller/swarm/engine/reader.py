"""Reads replicas, strays and GPUs from what a manager of a Swarm lists: services, tasks and nodes. Pure.

A replica is a service with at most one task at a time. Swarm makes another task when the last one has ended, or when
its node is down or drained; some of the earlier ones are still listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...engines.base import EngineEvent
from ...engines.docker_reader import timestamp
from ...engines.labels import read_labels, why_left_alone
from ...model.nodes import Node
from ...model.world import ContainerState, EdgePlace, Gpu, ReplicaContainer, StrayContainer
from ..names import Json
from .errors import end_explained, wait_explained
from .nodes import nodes
from .service_spec import GPU_KIND, NARROWED_LABEL, STOPPED_LABEL

_BY_ITSELF = ("complete", "failed", "rejected")
ENDED = (*_BY_ITSELF, "shutdown", "orphaned", "remove")
_ONLY_A_CODE = "task: non-zero exit"
"""The beginning of Swarm's text on a process that ended with a code, which the code itself says."""
_SAME_STEP_S = 1.0
"""Swarm makes the next task in the step in which it takes note of the end of the last one. A node that comes back
reports the ends of its former tasks long after their successors were made."""


@dataclass(frozen=True, slots=True)
class SwarmListing:
    """What a manager lists. `services` are those with our label."""

    services: Sequence[Json]
    tasks: Sequence[Json]
    nodes: Sequence[Json]

    def is_same(self, other: SwarmListing) -> bool:
        """Whether the other one has the very same lists."""
        return self.services is other.services and self.tasks is other.tasks and self.nodes is other.nodes


def start_of(tasks: Iterable[Json]) -> str:
    """When the task of a service that is up began to run, as Swarm writes it; "" while none is up."""
    up = [task for task in tasks if task["Status"]["State"] == "running" and task["DesiredState"] == "running"]
    return _began(up[-1]) if up else ""


def has_forgotten(tasks: Iterable[Json]) -> bool:
    """Whether Swarm has dropped the ended tasks of a service that it was ordered to drop. It does so in a moment.

    The service must not be removed in that very moment: the leader's engine (Docker 26.1) looks the task up again, does
    not find it and panics, which ends all containers of its node.
    """
    return not any(task["DesiredState"] == "remove" and task["Status"]["State"] in ENDED for task in tasks)


def replicas(listing: SwarmListing, project: str) -> tuple[ReplicaContainer, ...]:
    """The replicas of a project, by name."""
    known = {node.id: node for node in nodes(listing.nodes)}
    tasks = _by_service(listing.tasks)
    found = (_replica(service, tasks.get(service["ID"], ()), known, project) for service in listing.services)
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.name))


def left_alone(listing: SwarmListing, project: str) -> dict[str, str]:
    """What has the project's label and is no replica: by its name, why it is not touched."""
    names = [str(one["Spec"]["Name"]) for one in listing.services if _labels_of(one, project) is None]
    return {name: why_left_alone("service", name, project, "docker service rm") for name in names}


def strays(stack: Iterable[Json], project: str, service_names: Collection[str]) -> tuple[StrayContainer, ...]:
    """Services of `docker stack deploy` that run what replicas run: `docker service scale` has given them tasks."""
    found = []
    for service in stack:
        name = str(service["Spec"]["Name"])
        short = name.removeprefix(f"{project}_")
        if short in service_names and _wanted(service) > 0:
            found.append(StrayContainer(service["ID"], name, short))
    return tuple(sorted(found, key=lambda one: one.name))


def gpus(listing: SwarmListing, ours: Iterable[ReplicaContainer]) -> tuple[tuple[Gpu, ...], dict[str, str]]:
    """The GPUs of all nodes, and what holds those that no replica of ours has: by the GPU, its name.

    The GPUs of a node that takes no tasks are listed, too, as held by the node: they are not gone forever.
    """
    there = {node["ID"]: gpus_of((node.get("Description") or {}).get("Resources")) for node in listing.nodes}
    listed, holders = list[Gpu](), dict[str, str]()
    for node in nodes(listing.nodes):
        listed += [Gpu(uuid, "nvidia", node=node.name) for uuid in there[node.id]]
        if why := _condition(node):
            holders |= dict.fromkeys(there[node.id], f"{node.name} ({why})")
    taken = {*holders, *(uuid for one in ours for uuid in one.gpus)}
    running = (task for task in listing.tasks if task["Status"]["State"] not in ENDED)
    held = {uuid: _task_name(task) for task in running for uuid in gpus_of(task)}
    return tuple(listed), holders | {uuid: name for uuid, name in held.items() if uuid not in taken}


def edges(tasks: Iterable[Json], listed: Iterable[Json], network: str) -> dict[str, EdgePlace]:
    """The address in that network of each node's task, also while its health is not known yet, or while it ends.

    What a node had that is down is listed as running for a day.
    """
    known = {node.id: node for node in nodes(listed)}
    found = {}
    for task in sorted(tasks, key=_is_to_stay):  # a successor counts
        node, stays = known.get(task.get("NodeID", "")), _is_to_stay(task)
        is_up = task["Status"]["State"] in ("starting", "running")
        if node is None or not is_up or (node.state == "down" and not stays):
            continue
        for given in task.get("NetworksAttachments") or ():
            if given["Network"]["Spec"]["Name"] == network and given.get("Addresses"):
                found[node.name] = EdgePlace(str(given["Addresses"][0]).partition("/")[0], is_leaving=not stays)
    return found


def _is_to_stay(task: Json) -> bool:
    return str(task["DesiredState"]) == "running"


def changes(before: Iterable[ReplicaContainer], after: Iterable[ReplicaContainer]) -> list[EngineEvent]:
    """The events between two readings of the replicas."""
    old = {one.id: one for one in before}
    found = []
    for one in after:
        was = old.pop(one.id, None)
        if was != one:
            found += [EngineEvent(kind, one.id, one.name) for kind in _kinds(was, one)]
    for one in old.values():
        found += [EngineEvent(kind, one.id, one.name) for kind in (("die",) if one.state.is_up else ()) + ("destroy",)]
    return found


def _kinds(was: ReplicaContainer | None, now: ReplicaContainer) -> list[str]:
    kinds = [] if was else ["create"]
    was_up = was is not None and was.state.is_up
    is_another = was is not None and was.started_at != now.started_at
    if was_up and (is_another or not now.state.is_up):
        kinds.append("die")
    if now.state.is_up and (is_another or not was_up):
        kinds.append("start")
    return kinds or ["update"]


# ---------------------------------------------------------------------------------------------------------------- nodes


def _condition(node: Node) -> str:
    """Why it takes no tasks; "" = it takes some. A node that is unknown keeps its tasks, and takes none for now."""
    if node.state == "down":
        return "down"
    is_leaving = node.is_leaving and node.availability == "pause"
    return "leaving" if is_leaving else {"drain": "drained", "pause": "paused"}.get(node.availability, "")


def gpus_of(one: Json | None) -> tuple[str, ...]:
    """The GPUs among the `GenericResources` of a task, or of a node's resources."""
    named = (each.get("NamedResourceSpec") or {} for each in (one or {}).get("GenericResources") or ())
    return tuple(str(each["Value"]) for each in named if each.get("Kind") == GPU_KIND)


def _task_name(task: Json) -> str:
    """The replica that it is of, which may be gone already, else the service."""
    labels = (task["Spec"].get("ContainerSpec") or {}).get("Labels") or {}
    return str(labels.get("pierhead.replica") or task.get("ServiceID", ""))


# ------------------------------------------------------------------------------------------------------------- replicas


@dataclass(frozen=True, slots=True)
class _Standing:
    """How a replica stands, by its service and its tasks."""

    state: ContainerState
    task: Json | None = None
    """The one that it is, or was, where there is one."""
    words: str = ""


def _replica(service: Json, tasks: Sequence[Json], nodes: Mapping[str, Node], project: str) -> ReplicaContainer | None:
    read = _labels_of(service, project)
    if read is None:
        return None
    standing = _standing(service, tasks, nodes)
    task, is_up = standing.task, standing.state.is_up
    status: Json = task["Status"] if task else {}
    node = nodes.get(task.get("NodeID", "")) if task else None
    read["node"] = node.name if node else ""
    # Before it has a node it holds what it was made for: as many are taken wherever it goes.
    read["gpus"] = (gpus_of(task) if task else ()) or read["gpus"]
    return ReplicaContainer(
        id=service["ID"],
        state=standing.state,
        ip=_address(task) if task and is_up else None,
        created_at=timestamp(service["CreatedAt"]) or 0.0,
        started_at=_started_at(service, standing),
        exit_code=None if is_up else _exit_code(status),
        engine_detail=standing.words,
        moved=_moved(tasks, nodes) if is_up else "",
        is_half_started=_wanted(service) > 0 and NARROWED_LABEL in (service["Spec"].get("Labels") or {}),
        **read,
    )


def _labels_of(service: Json, project: str) -> dict[str, Any] | None:
    return read_labels(service["Spec"].get("Labels") or {}, str(service["Spec"]["Name"]), project)


def _started_at(service: Json, standing: _Standing) -> float | None:
    """When its task began to run; of one that has ended by itself, when it was made.

    A task has only the time of its last change, which the stop signal is, too.
    """
    noted = (service["Spec"].get("Labels") or {}).get(STOPPED_LABEL)
    if noted:
        with suppress(ValueError, OverflowError):  # another program has written something else
            return timestamp(noted)
        return None
    if standing.task is None or standing.state is ContainerState.PENDING:
        return None
    return timestamp(_began(standing.task) if standing.state.is_up else standing.task["CreatedAt"])


def _began(task: Json) -> str:
    """When a task that runs began to, by its node's clock; not before it was made, by the leader's."""
    made, told = str(task["CreatedAt"]), str(task["Status"]["Timestamp"])
    return max((made, told), key=lambda at: timestamp(at) or 0.0)


def _standing(service: Json, tasks: Sequence[Json], nodes: Mapping[str, Node]) -> _Standing:
    if _wanted(service) == 0:
        return _not_wanted(service, tasks, nodes)
    if not tasks:
        return _Standing(ContainerState.PENDING)
    newest = tasks[-1]
    state = newest["Status"]["State"]
    if state == "running":
        return _Standing(ContainerState.RUNNING, newest)
    if state in ENDED:
        return _ended(newest, nodes)
    before = tasks[-2] if len(tasks) > 1 else None
    if before is not None and _ended_by_itself(before, newest):
        return _ended(before, nodes)
    return _Standing(ContainerState.PENDING, newest, _waits(newest, before, nodes))


def _not_wanted(service: Json, tasks: Sequence[Json], nodes: Mapping[str, Node]) -> _Standing:
    """It was never started, or was sent its stop signal: Swarm forgets its task soon after the end. On a node that is
    down it is listed as running for a day.
    """
    up = [task for task in tasks if task["Status"]["State"] == "running" and not _is_lost(task, nodes)]
    if up:
        return _Standing(ContainerState.RUNNING, up[-1])
    if STOPPED_LABEL in (service["Spec"].get("Labels") or {}):
        return _Standing(ContainerState.EXITED, tasks[-1] if tasks else None)
    return _Standing(ContainerState.CREATED)


def _is_lost(task: Json, nodes: Mapping[str, Node]) -> bool:
    node = nodes.get(task.get("NodeID", ""))
    return node is None or node.state == "down"


def _ended(task: Json, nodes: Mapping[str, Node]) -> _Standing:
    error = str(task["Status"].get("Err") or "")
    if not error or error.startswith(_ONLY_A_CODE):
        return _Standing(ContainerState.EXITED, task)
    node = nodes.get(task.get("NodeID", ""))
    where = f" on {node.name}" if node else ""
    return _Standing(ContainerState.EXITED, task, f"could not be started{where}: {end_explained(error)}")


def _ended_by_itself(task: Json, successor: Json) -> bool:
    """Whether a task has a successor because it has ended, and not because its node is down or drained.

    Both times are those of the leader's clock, and not of a node's.
    """
    if task["Status"]["State"] not in _BY_ITSELF:
        return False
    noted, made = timestamp(task["UpdatedAt"]) or 0.0, timestamp(successor["CreatedAt"]) or 0.0
    return noted <= made + _SAME_STEP_S


def _waits(task: Json, before: Json | None, nodes: Mapping[str, Node]) -> str:
    """Why a task does not run yet."""
    lost = nodes.get(before.get("NodeID", "")) if before else None
    moved = f"{lost.name} is {_condition(lost)}; " if lost and _condition(lost) else ""
    status, node = task["Status"], nodes.get(task.get("NodeID", ""))
    if status.get("Err"):
        return moved + wait_explained(str(status["Err"]), task, [*nodes.values()])
    return f"{moved}{node.name}: {status.get('Message', '')}" if node else f"{moved}{status.get('Message', '')}"


def _moved(tasks: Sequence[Json], nodes: Mapping[str, Node]) -> str:
    """Where a running replica comes from and why, in words; "" where its last task has ended by itself, or was none."""
    if len(tasks) < 2 or _ended_by_itself(tasks[-2], tasks[-1]):
        return ""
    was, now = (nodes.get(task.get("NodeID", "")) for task in tasks[-2:])
    if was is None or now is None:
        return "" if now is None else f"Swarm has moved it to {now.name}: its node is gone"
    if was.name == now.name:
        return f"Swarm has replaced it on {now.name}"
    why = _condition(was)
    return f"Swarm has moved it from {was.name} to {now.name}" + (f": {was.name} is {why}" if why else "")


def _by_service(tasks: Iterable[Json]) -> dict[str, list[Json]]:
    """The tasks of each service, the newest last."""
    found: dict[str, list[Json]] = {}
    for task in tasks:
        found.setdefault(str(task.get("ServiceID", "")), []).append(task)
    for listed in found.values():
        listed.sort(key=lambda task: timestamp(task["CreatedAt"]) or 0.0)
    return found


def _wanted(service: Json) -> int:
    mode = service["Spec"]["Mode"]
    return int((mode.get("Replicated") or {}).get("Replicas") or 0) if "Global" not in mode else 1


def _exit_code(status: Json) -> int | None:
    container = status.get("ContainerStatus") or {}
    has_ended = container.get("ContainerID") and status["State"] in ENDED
    return int(container.get("ExitCode") or 0) if has_ended else None


def _address(task: Json) -> str | None:
    """Its address in its primary network, which its spec names first."""
    wanted = [network["Target"] for network in task["Spec"].get("Networks") or ()]
    given = {one["Network"]["ID"]: one.get("Addresses") or () for one in task.get("NetworksAttachments") or ()}
    for network in (*wanted[:1], *given):
        for address in given.get(network, ()):
            return str(address).partition("/")[0]
    return None
