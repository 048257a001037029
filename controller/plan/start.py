"""Starts the replicas that a service lacks, with their GPUs, within the limits of a rolling update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..model.actions import CreateContainer, PullImage, StartContainer, replica_name
from ..model.phases import Phase
from ..model.plan import PendingReplica
from ..model.spec import GpuRequest, ServiceSpec
from ..model.world import FailureRecord, Gpu
from .draft import Draft
from .failures import backing_off
from .outlook import Numbers, ReplicaOutlook, ServiceOutlook, allowed_left, open_nodes
from .placement import Grant, Shortage
from .sleep import let_go, let_one_go, sleepers, wake
from .swaps import hold_for_successors


def mends(draft: Draft, outlook: ServiceOutlook) -> bool:
    """Whether a service replaces replicas that it had: its version changes, or a replica failed."""
    failed = (
        (outlook.name, version or "") in draft.observed.failures for version in (outlook.version, outlook.goal.keep)
    )
    return outlook.bounds is not None or any(failed)


def start_created(draft: Draft, outlook: ServiceOutlook) -> None:
    """Start containers that an earlier controller created and did not start, or whose start was interrupted."""
    for replica in outlook.alive() if outlook.spec else ():
        is_spare = replica.is_kept and len(outlook.alive()) > outlook.target  # it would go, if it could be removed now
        cause = ""
        if replica.phase is Phase.CREATED and not is_spare:
            cause = "created and never started"
        elif replica.container.is_half_started:
            cause = "its start was interrupted"
        if cause and not replica.busy:
            draft.add(StartContainer(target=replica.name, service=outlook.name, cause=cause))


def start_successors(draft: Draft, outlook: ServiceOutlook) -> None:
    """Start a successor for each replica that leaves; while its GPU is still held, reserve what else it takes."""
    going = outlook.going()
    followed = len(outlook.removal_steps) + len(going)
    start_missing(draft, outlook, followed - outlook.started - sum(outlook.held.values()))
    if going and outlook.most is None:
        hold_for_successors(draft, outlook, going)


def start_missing(draft: Draft, outlook: ServiceOutlook, most: int) -> Shortage | None:
    """Start missing replicas, at most `most`; return why not if this machine has no place for one."""
    spec = outlook.spec
    if spec is None or most <= 0:
        return None
    if outlook.most is not None:
        most = min(most, outlook.most - outlook.started)
    most -= _restore_kept(draft, outlook, most)
    lacking = min(outlook.lacking() - outlook.held.get(outlook.version, 0), most)
    if lacking <= 0 or obstacle(draft, outlook, spec) is not None:
        return None
    cause = _start_cause(outlook, draft.observed.failures.get((outlook.name, outlook.version or "")))
    for _ in range(lacking):
        shortage = _create(draft, outlook, outlook.goal.spec or spec, outlook.version, cause)
        if shortage is not None:
            return shortage
    return None


def start_rest(draft: Draft, outlook: ServiceOutlook) -> None:
    """Start what else may be started, and say why replicas that are still missing cannot be."""
    spec = outlook.spec
    if spec is None:
        return
    _pull_image(draft, outlook, spec)
    outlook.held.clear()  # waiting services were served first
    shortage = start_missing(draft, outlook, outlook.lacking() + outlook.kept_lacking())
    missing = outlook.lacking()
    if not missing:
        return
    reason = obstacle(draft, outlook, spec) or outlook.turn
    if shortage is None:
        if not reason:
            raise AssertionError("internal: a replica that could be started was not")
        to_be_built = outlook.version is None and spec.has_build
        pending = PendingReplica(outlook.name, reason, blocked=to_be_built)
    else:
        remedy = f"; {outlook.turn}" if outlook.turn else _shortage_remedy(outlook)
        room = _room_words(draft, spec, missing) if shortage.is_brief else ""
        words = shortage.reason + room + remedy + _faults_words(draft)
        is_blocked = shortage.blocked and not outlook.room_comes
        pending = PendingReplica(outlook.name, words, is_blocked, has_no_place=not shortage.is_brief)
    draft.pending += _pending(outlook, pending, missing)


def _room_words(draft: Draft, spec: ServiceSpec, missing: int) -> str:
    """How many of the missing replicas fit on the machine, where not all do."""
    left = draft.machine.left(spec)
    if left is None or left >= missing:
        return ""
    return f"; this machine has room for about {max(0, left)} of the {missing} that are missing"


def _pending(outlook: ServiceOutlook, pending: PendingReplica, count: int) -> Iterator[PendingReplica]:
    """Yield it `count` times; the last ones are for displaced replicas, which serve until there is room elsewhere."""
    displaced = [one.container.node for one in outlook.alive() if one.displaced]
    serving = displaced[: max(0, count - max(0, outlook.target - outlook.total()))]
    yield from [pending] * (count - len(serving))
    for node in serving:
        reason = f"{pending.reason}; the one on node {node}, which leaves, serves until then"
        yield replace(pending, reason=reason, replaces=node)


def _restore_kept(draft: Draft, outlook: ServiceOutlook, most: int) -> int:
    """Replace lost replicas of the version that continues to serve. Returns how many were added."""
    keep, keep_spec = outlook.goal.keep, outlook.goal.keep_spec
    missing = min(outlook.kept_lacking() - outlook.held.get(keep, 0), most)
    if missing <= 0 or keep_spec is None or backing_off(draft, outlook.name, keep or "") is not None:
        return 0
    for restored in range(missing):
        cause = f"{keep} keeps serving while {outlook.version} is tried"
        if _create(draft, outlook, keep_spec, keep, cause) is not None:
            return restored  # the message of the new version names the missing GPU, or the service that holds it
    return missing


def _shortage_remedy(outlook: ServiceOutlook) -> str:
    former = [replica for replica in outlook.alive() if replica.container.version != outlook.version]
    spec, ready = outlook.spec, sum(replica.serves for replica in former)
    if spec is None or outlook.has_place or not ready:
        return ""
    unavailable = spec.rollout.max_unavailable
    if unavailable < ready == 1:
        return "; the only replica stays until then, unless x-serve.rollout.max_unavailable is 1"
    return (
        f"; the {ready} that serve stay, as {max(unavailable, 1)} less would not make room: raise "
        "x-serve.rollout.max_unavailable, or ask for less"
    )


def _faults_words(draft: Draft) -> str:
    faults = sorted(draft.observed.gpu_faults)
    if not faults:
        return ""
    return f"; not used because of a fault: {', '.join(faults)} (`pierhead status` says why, `pierhead unmark` ends it)"


def _pull_image(draft: Draft, outlook: ServiceOutlook, spec: ServiceSpec) -> None:
    """Pull a missing image, even if nothing is to be started: the new version is known only by its image."""
    image_missing = spec.image in draft.observed.images and draft.observed.images[spec.image] is None
    if image_missing and outlook.target and not spec.has_build and outlook.name not in draft.busy:
        cause = "a replica is to be started and the image is not on this machine"
        cause = cause if outlook.lacking() else "without it the service's new version is not known"
        draft.add(PullImage(target=outlook.name, service=outlook.name, image=spec.image, spec=spec, cause=cause))


def obstacle(draft: Draft, outlook: ServiceOutlook, spec: ServiceSpec) -> str | None:
    """Return why nothing of this service can be started now, whatever place there is; None = it can be."""
    if outlook.version is None:
        if spec.has_build:
            return f"image {spec.image} is not on this machine: build it (`docker compose build {spec.name}`)"
        return f"image {spec.image} is not on this machine: it is being pulled"
    if outlook.goal.spec is None:
        return f"no record says how version {outlook.version} is made: `pierhead deploy` uses the files' definition"
    return backing_off(draft, outlook.name, outlook.version)


def _start_cause(outlook: ServiceOutlook, failure: FailureRecord | None) -> str:
    cause = f"{len(outlook.alive()) + len(outlook.creating)} of {outlook.target} replicas exist"
    former = {replica.container.version for replica in outlook.alive() if replica.outdated} - {outlook.version}
    if former:
        return f"version {outlook.version} replaces {', '.join(sorted(former))}"
    if leaving := sorted({replica.container.node for replica in outlook.alive() if replica.displaced}):
        return f"in place of one on node {', '.join(leaving)}, which leaves"
    if failure is not None:
        return f"{cause}; failure {failure.count}: {failure.detail}"
    return cause


def _create(
    draft: Draft, outlook: ServiceOutlook, spec: ServiceSpec, version: str | None, cause: str
) -> Shortage | None:
    """Add the steps for one new replica, or wake one; return why not if this machine has no place for it."""
    if version is None:
        raise AssertionError("internal: a replica is created without a version")
    if asleep := sleepers(draft, outlook, version):
        woken = _wake(draft, outlook, spec, asleep, cause)
        if woken is not None:
            return None if isinstance(woken, Grant) else woken
    if outlook.numbers is None:
        outlook.numbers = Numbers.of(outlook)
    shortage = _machine_shortage(draft, outlook, spec, outlook.numbers.here)
    if shortage is not None:
        return shortage
    number, predecessors = outlook.numbers.lowest_free()
    after = [outlook.removal_steps[replica.name] for replica in predecessors]
    gpus: tuple[Gpu, ...] = ()
    if spec.gpu is not None:
        preferred = tuple(uuid for replica in predecessors for uuid in replica.container.gpus)
        granted = _take_gpus(draft, outlook, spec.gpu, preferred)
        if isinstance(granted, Shortage):
            return granted
        gpus = granted.gpus
        after += granted.after
    outlook.numbers.take(number)
    draft.machine.take(outlook.name)
    name = replica_name(draft.desired.project, outlook.name, version, number)
    create = CreateContainer(
        target=name,
        service=outlook.name,
        version=version,
        number=number,
        gpus=gpus,
        spec=spec,
        cause=cause,
    )
    created = draft.add(create, *after)
    outlook.planned.append(create)
    draft.add(StartContainer(target=name, service=outlook.name, cause=cause), created)
    return None


def _wake(
    draft: Draft, outlook: ServiceOutlook, spec: ServiceSpec, asleep: list[ReplicaOutlook], cause: str
) -> Grant | Shortage | None:
    """Wake a replica whose GPUs are free. None: a new one is to be started; one of these leaves if that has a place."""
    request, gpus = spec.gpu, draft.gpus
    if request is None:
        return None
    free = [one for one in asleep if gpus.is_free(outlook.name, request, one.container.gpus)]
    if free:
        granted = gpus.take(outlook.name, request, free[0].container.gpus)
        if isinstance(granted, Grant):
            wake(draft, outlook, free[0], cause, granted.after)
        return granted
    if gpus.awaits_reading or not gpus.fits(outlook.name, request):
        return _take_gpus(draft, outlook, request, ())
    let_go(draft, asleep[0].container, "other GPUs than its own are free")
    return None


def _machine_shortage(draft: Draft, outlook: ServiceOutlook, spec: ServiceSpec, here: int) -> Shortage | None:
    """Why nothing can be started, whatever GPUs are free; a replica that sleeps makes room then."""
    left = allowed_left(draft, outlook, spec, here)
    if left is not None and left <= 0:
        return Shortage(_full_words(draft, spec, here))
    shortage = draft.machine.shortage(spec, is_needed=mends(draft, outlook) or not outlook.alive())
    if shortage is not None and not shortage.is_brief:
        let_one_go(draft, outlook.name)
    return shortage


def _take_gpus(
    draft: Draft, outlook: ServiceOutlook, request: GpuRequest, preferred: tuple[str, ...]
) -> Grant | Shortage:
    """As `GpuBudget.take`; where only memory in use is in the way, and none gives way, a replica that sleeps leaves."""
    granted = draft.gpus.take(outlook.name, request, preferred)
    is_clear = not (draft.gpus.awaits_reading or outlook.room_comes)
    if isinstance(granted, Shortage) and is_clear and not granted.blocked:
        let_one_go(draft, outlook.name, draft.gpus.in_use_by_others(request))
    return granted


def _full_words(draft: Draft, spec: ServiceSpec, here: int) -> str:
    most = spec.max_replicas_per_node
    if draft.observed.nodes:
        usable = len(open_nodes(draft, spec))
        there = "1 node takes" if usable == 1 else f"{usable} nodes take"
        return f"{there} its replicas and max_replicas_per_node is {most}: raise it, add a node, or ask for fewer"
    there = "1 replica is" if here == 1 else f"{here} replicas are"
    return f"{there} on this machine and max_replicas_per_node is {most}: raise it, or ask for fewer"
