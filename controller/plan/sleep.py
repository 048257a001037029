"""Replicas that sleep between their turns on GPUs (turns.py), in the place of being stopped and started again. Pure.

    drained --> PutToSleep --> ASLEEP --+-- its service is wanted again, and its GPUs are free --> WakeReplica
                    |                   `-- it is no longer wanted, or others need the memory --> SIGTERM
                    `-- it reports an error, or is not asleep within its grace period --> SIGTERM

A sleeper is a retirement that has not come to its end, so it counts nowhere as a replica. Its label does not hold its
GPUs: what their memory in use is beyond what others hold is taken, the rest is free.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ..model.actions import PutToSleep, SignalContainer, WakeReplica
from ..model.phases import Phase
from ..model.world import ReplicaContainer, ReplicaHealth, Retirement, probe_address
from .draft import Draft
from .outlook import ReplicaOutlook, ServiceOutlook


def may_sleep(draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, retirement: Retirement) -> bool:
    """Whether a replica that has drained is to sleep; takes the memory that it needs for that."""
    container, report, spec = replica.container, replica.container.sleep, outlook.goal.spec or outlook.spec
    reading = draft.observed.gpu_reading
    return (
        report is not None
        and report.can
        and spec is not None
        and not retirement.failed
        and outlook.name in draft.desired.demands
        and not why_not_kept(draft, outlook, replica)
        and (container.health is ReplicaHealth.READY or not report.is_awake)
        and not container.reported_draining
        and container.ongoing == 0
        and (draft.routing_usable or not spec.is_routed)
        and reading is not None
        and (reading.at == -math.inf or reading.used_bytes.keys() >= {*container.gpus})
        and draft.machine.take_sleeper(container, spec)
    )


def why_not_kept(draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook) -> str:
    """Why a replica does not stay to sleep; "" = it may."""
    container = replica.container
    if outlook.spec is None or outlook.spec.yields is None:
        return "its service takes no turns on GPUs any more"
    if outlook.name in draft.desired.switched_off:
        return "0 wanted, and no request wakes it"
    if replica.outdated:
        return f"its version is not {outlook.version}"
    if container.health is ReplicaHealth.FAILED:
        return f"its readiness probe failed: {container.health_detail}"
    return container.gpu_fault


def stay_asleep(draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook) -> None:
    """Stop a replica that may not sleep any longer; delete a server that HAProxy has of one that may."""
    why = why_not_kept(draft, outlook, replica)
    server = draft.server_of(outlook.name, replica.name)
    if why:
        let_go(draft, replica.container, why)
    elif server is not None:
        draft.delete_server(server, outlook.name, "its replica sleeps")


def put_to_sleep(draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, cause: str) -> None:
    """Delete the server of a replica that has drained, and tell it to sleep."""
    server = draft.server_of(outlook.name, replica.name)
    deleted = draft.delete_server(server, outlook.name, cause) if server else None
    _tell(draft, outlook, replica, PutToSleep, cause, [deleted])


def sleepers(draft: Draft, outlook: ServiceOutlook, version: str | None) -> list[ReplicaOutlook]:
    """The replicas of a version that can be woken."""
    asleep = [replica for replica in outlook.replicas if replica.phase is Phase.ASLEEP and replica.may_change]
    return [one for one in asleep if one.is_of(version) and one.container.id not in draft.let_go]


def wake(draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, cause: str, after: Collection[int]) -> None:
    """Tell a replica to wake up, after these steps; it counts as being started."""
    _tell(draft, outlook, replica, WakeReplica, cause, after)
    outlook.wake(replica)


def wake_again(draft: Draft, outlook: ServiceOutlook) -> None:
    """Repeat it to replicas that it has not reached."""
    for replica in outlook.alive():
        report = replica.container.sleep
        if report is not None and report.wanted and replica.may_change:
            _tell(draft, outlook, replica, WakeReplica, "it is wanted, and was not told to wake up yet")


def _tell(
    draft: Draft,
    outlook: ServiceOutlook,
    replica: ReplicaOutlook,
    action: type[PutToSleep | WakeReplica],
    cause: str,
    after: Collection[int | None] = (),
) -> None:
    """Tell it at its admin port. While it has no address its probe fails, and it is stopped in the end."""
    container = replica.container
    address = probe_address(container, outlook.spec) if outlook.spec else None
    if address is not None:
        names = {"target": replica.name, "service": outlook.name, "container_id": container.id, "cause": cause}
        draft.add(action(**names, address=address), *after)


def let_go(draft: Draft, container: ReplicaContainer, cause: str) -> None:
    """Stop a replica that sleeps."""
    draft.let_go.add(container.id)
    names = {"target": container.name, "service": container.service, "container_id": container.id}
    draft.add(SignalContainer(**names, signal="SIGTERM", cause=f"it sleeps, and {cause}"))


def let_one_go(draft: Draft, needy: str, gpus: frozenset[str] | None = None) -> None:
    """Stop the least recently used of the replicas that sleep, one after the other, for a service that needs the memory
    of the machine, or of these GPUs. Those of this service go last.
    """
    observed, marks = draft.observed, draft.observed.retirements
    leaving = [mark for one in observed.containers if (mark := marks.get(one.id)) and mark.stopping_since is not None]
    signalled = {action.container_id for action in observed.in_progress if isinstance(action, SignalContainer)}
    one_leaves = any(mark.sleeping_since is not None for mark in leaving) or not signalled.isdisjoint(observed.asleep)
    is_unclear = gpus is None and draft.machine.pledged_bytes  # less of it may be taken in the end
    if draft.let_go or observed.brake or one_leaves or is_unclear:
        return
    taken = draft.busy.union(step.action.target for step in draft.steps)
    sleepers = [
        one
        for one in observed.containers
        if one.id in observed.asleep and one.name not in taken and (gpus is None or not gpus.isdisjoint(one.gpus))
    ]
    wanted, its = draft.desired.targets, "memory" if gpus is None else "GPUs' memory"

    def value(one: ReplicaContainer) -> tuple[bool, bool, float, str]:
        return one.service == needy, wanted.get(one.service, 0) > 0, marks[one.id].draining_since, one.name

    for one in sorted(sleepers, key=value)[:1]:
        let_go(draft, one, f"{needy} needs its {its}")
