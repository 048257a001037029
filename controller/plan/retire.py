"""Chooses replicas to retire: failed ones at once, outdated ones when enough others are ready, then surplus ones."""

from __future__ import annotations

from collections.abc import Iterable

from ..model.actions import BeginRetirement
from ..model.phases import Phase
from ..model.spec import ServiceSpec
from ..model.world import ReplicaHealth, ServerState
from .draft import Draft
from .leave import DRAIN_LOOK_S, remove
from .outlook import ReplicaOutlook, ServiceOutlook, bounds_of, open_nodes, places_left
from .shares import Bounds
from .swaps import Places, Swap, swap


def retire(draft: Draft, outlook: ServiceOutlook) -> None:
    """Begin the retirement of failed replicas, and of replicas that are not needed."""
    for replica in outlook.replicas:
        if replica.phase is Phase.FAILED and replica.container.state.is_up and replica.may_change:
            if _serves_in_spite(replica) and not _has_gpu_elsewhere(draft, outlook):
                continue
            begin_retirement(draft, outlook, replica, replica.detail, failed=True)
    for replica, cause in _superfluous(draft, outlook):
        if not replica.may_change:
            continue
        if replica.phase is Phase.CREATED:
            remove(draft, outlook, replica, cause, failed=False)
        else:
            begin_retirement(draft, outlook, replica, cause, failed=False)


def _serves_in_spite(replica: ReplicaOutlook) -> bool:
    """Whether a replica answers although the engine does not list its GPU: the list may be wrong."""
    container = replica.container
    return bool(container.gpu_fault) and container.health is ReplicaHealth.READY


def _has_gpu_elsewhere(draft: Draft, outlook: ServiceOutlook) -> bool:
    spec = outlook.spec
    if spec is None or spec.gpu is None:
        return True
    return draft.gpus.room(outlook.name, spec.gpu, 1) == 1


def _superfluous(draft: Draft, outlook: ServiceOutlook) -> list[tuple[ReplicaOutlook, str]]:
    """Choose the replicas that go: outdated ones as far as readiness allows, then those above the target.

    A ready outdated replica goes only while enough others are ready, so the last ready one never goes first. Of the
    version that is kept while another one is tried, as many replicas stay as the trial needs.
    """
    alive = outlook.alive()
    current = [replica for replica in alive if not replica.outdated]
    surplus = len(current) - outlook.target
    # Creations in progress count towards the target but cannot be undone: they are removed once they exist.
    above = _least_useful_first(current)[: max(surplus, 0)]
    return [*_outdated(draft, outlook), *((replica, _scale_cause(outlook)) for replica in above)]


def _outdated(draft: Draft, outlook: ServiceOutlook) -> list[tuple[ReplicaOutlook, str]]:
    """Choose the outdated replicas that go. Beyond the surplus, a replica goes only if its successor finds room."""
    spec, limits = outlook.spec, outlook.bounds
    if spec is None or limits is None:
        return []
    chosen, others = _may_go(outlook, limits)
    candidates, most = _at_a_time(outlook, limits, chosen, others)
    found = _swap(draft, outlook, spec, limits, gone=chosen, candidates=candidates, most=most)
    if not found.has_place and outlook.goal.goes_back:
        most = len(others) - int(not spec.rollout.max_unavailable)
        found = _swap(draft, outlook, spec, limits, gone=chosen, candidates=others, most=most, fewest=True)
    if not found.has_place:
        outlook.bounds = limits = bounds_of(draft, outlook, has_place=False) or limits
        chosen, _ = _may_go(outlook, limits)
    else:
        names = {container.name for container in found.victims}
        chosen += [replica for replica in others if replica.name in names]
    if not found.has_place or any(replica.waits_for_node for replica in outlook.alive()):
        at_once = {name for name, node in draft.leaving.items() if node.leaves_at_once}
        chosen += [one for one in others if one.container.node in at_once and one not in chosen]
    cause = _outdated_cause(outlook, limits)
    return [(one, f"node {one.container.node} leaves" if one.displaced else cause) for one in chosen]


def _may_go(outlook: ServiceOutlook, limits: Bounds) -> tuple[list[ReplicaOutlook], list[ReplicaOutlook]]:
    """(replicas that go in any case, replicas that may go to make room for a successor)."""
    outdated = [replica for replica in outlook.alive() if replica.outdated]
    kept = [replica for replica in outdated if replica.is_of(outlook.goal.keep)]
    others = [replica for replica in outdated if not replica.is_of(outlook.goal.keep)]
    spare = max(0, len(kept) - limits.keep)
    sure: list[ReplicaOutlook] = []
    maybe: list[ReplicaOutlook] = []
    least = max(limits.floor, outlook.reachable)
    serving, ready = outlook.without()
    for replica in [*_least_useful_first(others), *_least_useful_first(kept)[:spare]]:
        # A replica that HAProxy does not reach can go however few serve: it serves no request.
        if not replica.is_ready or (ready > least and (serving > least or not replica.serves)):
            sure.append(replica)
            serving -= replica.serves
            ready -= replica.is_ready
        else:
            maybe.append(replica)
    return sure, maybe


def _at_a_time(
    outlook: ServiceOutlook, limits: Bounds, gone: list[ReplicaOutlook], others: list[ReplicaOutlook]
) -> tuple[list[ReplicaOutlook], int]:
    """(replicas among `others` that may go for successors now, in addition to `gone`; how many of them)."""
    serving, ready = outlook.without(gone)
    if serving > limits.floor:
        return others, serving - limits.floor
    return [replica for replica in others if not replica.serves], max(0, ready - limits.floor)


def _swap(
    draft: Draft,
    outlook: ServiceOutlook,
    spec: ServiceSpec,
    limits: Bounds,
    *,
    gone: list[ReplicaOutlook],
    candidates: list[ReplicaOutlook],
    most: int,
    fewest: bool = False,
) -> Swap:
    """Find the candidates that have to go so that replicas of the wanted version find a place, once `gone` have left.

    `fewest`: make room for one replica only.
    """
    goal, made = outlook.goal, outlook.made_as(outlook.version) + outlook.held.get(outlook.version, 0)
    total = outlook.total() - len(gone) - min(most, len(candidates))
    count = max(0, min(limits.goal - made, limits.ceiling - total, 1 if fewest else limits.goal))
    kept = 0 if goal.keep_spec is None else max(0, limits.keep - outlook.made_as(goal.keep))
    if count and (goal.spec is None or goal.version is None):
        return Swap((), has_place=False)
    if not count and not candidates:
        return Swap((), has_place=True)
    left = places_left(draft, outlook, spec, outlook.here())
    leaving = [replica.container for replica in (*outlook.going(), *gone)]
    closed = {node.name for node in draft.observed.nodes} - {*open_nodes(draft, spec)}
    places = Places.after(draft.gpus, outlook.name, leaving, left, closed)
    return swap(
        places,
        [replica.container for replica in candidates],
        (count, (goal.spec or spec).gpu),
        (kept, goal.keep_spec.gpu if goal.keep_spec else None),
        most,
    )


def _outdated_cause(outlook: ServiceOutlook, limits: Bounds) -> str:
    if not outlook.target:
        return _scale_cause(outlook)
    cause = f"its version is not {outlook.version}"
    if not limits.one_by_one:
        return cause
    lacking = "no GPU is free" if outlook.spec and outlook.spec.gpu else "there is no room"
    return f"{cause}; {lacking} for one more, so they are replaced one by one"


def _least_useful_first(replicas: Iterable[ReplicaOutlook]) -> list[ReplicaOutlook]:
    """Replicas that do not serve yet, then those with the fewest requests in flight; ties go by the highest number."""
    order = {Phase.CREATED: 0, Phase.STARTING: 1, Phase.RUNNING: 2}

    def usefulness(replica: ReplicaOutlook) -> tuple[int, bool, int, int, str]:
        container = replica.container
        return order[replica.phase], replica.serves, container.ongoing or 0, -container.number, replica.name

    return sorted(replicas, key=usefulness)


def _scale_cause(outlook: ServiceOutlook) -> str:
    if outlook.spec is None:
        return f"the compose files have no service {outlook.name} any more"
    return f"{len(outlook.alive())} replicas, {outlook.target} wanted"


def begin_retirement(
    draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, cause: str, *, failed: bool
) -> None:
    """Take a replica out of rotation; it is stopped once it has drained."""
    server = draft.server_of(outlook.name, replica.name)
    if server:
        wanted = ServerState.MAINT if failed else ServerState.DRAIN
        if server.state is not wanted:
            draft.set_server(outlook.name, replica.name, wanted, cause)
    draft.add(
        BeginRetirement(
            target=replica.name, service=outlook.name, container_id=replica.container.id, failed=failed, cause=cause
        )
    )
    outlook.leaving.add(replica.container.id)
    draft.look_again_in(DRAIN_LOOK_S)
