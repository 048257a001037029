"""Places that are kept: for who failed and waits for its next try, and for successors of those who go."""

from __future__ import annotations

from controller.model import ServiceSpec
from controller.planning.backoff import backing_off
from controller.planning.draft import Draft
from controller.planning.outlook import ReplicaOutlook, ServiceOutlook
from controller.swaps import Places


def hold_for_next_try(draft: Draft, outlook: ServiceOutlook) -> None:
    """Keep the places of replicas that failed and wait for their next try: nobody else gets them meanwhile."""
    goal, spec = outlook.goal, outlook.spec
    if spec is None:
        return
    missing = outlook.target - outlook.total()
    begins = goal.keep is not None and not outlook.made_as(goal.version)
    if goal.version and backing_off(draft, outlook.name, goal.version) is not None:
        _hold(draft, outlook, goal.version, goal.spec or spec, max(missing, int(begins)))
    elif goal.keep and goal.keep_spec and backing_off(draft, outlook.name, goal.keep) is not None:
        # The first one of the new version may have such a place: it may be the cure.
        _hold(draft, outlook, goal.keep, goal.keep_spec, missing - int(begins))


def _hold(draft: Draft, outlook: ServiceOutlook, version: str, spec: ServiceSpec, count: int) -> None:
    for _ in range(count):
        if spec.gpu is None or not spec.gpu.count or not draft.gpus.place(outlook.name, spec.gpu):
            return
        outlook.held[version] = outlook.held.get(version, 0) + 1


def hold_for_successors(draft: Draft, outlook: ServiceOutlook, going: list[ReplicaOutlook]) -> None:
    """Keep what successors need beside what those leave who go: they wait for all of it, or for none."""
    goal, spec = outlook.goal, outlook.spec
    most = len(going) - sum(outlook.held.values())
    if spec is None or most <= 0:
        return
    places = Places.after(draft.gpus, outlook.name, [replica.container for replica in going])
    wanted = [(goal.version, goal.spec or spec)] * (outlook.lacking() - outlook.held.get(goal.version, 0))
    if goal.keep_spec:
        wanted += [(goal.keep, goal.keep_spec)] * (outlook.kept_lacking() - outlook.held.get(goal.keep, 0))
    for version, made in wanted[:most]:
        uuids = places.ledger.place(outlook.name, made.gpu) if made.gpu and made.gpu.count else ()
        if uuids and made.gpu:
            draft.gpus.hold(outlook.name, uuids, made.gpu.slot)
            outlook.held[version] = outlook.held.get(version, 0) + 1
