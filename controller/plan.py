"""plan(desired, observed, now) -> Plan: what has to be done, and why.

Pure: no I/O, no clock, no randomness, no logging.

Per service, in this order (each numbered in the code):

    1. finish   replicas on their way out: drained -> SIGTERM; past the grace -> SIGKILL; exited -> removed
    2. retire   failed ones at once; outdated ones when enough others are ready; surplus, not-ready ones first
    3. start    what is missing, with GPUs; while a version changes, within the bounds of controller/shares.py; who
                replaces somebody comes before who is one more than there were
    4. register ready ones with HAProxy, and only those
    5. configure those that were given another user_config than they shall have

Nothing waits inside a plan: what cannot be done yet is planned again at the next tick (`next_look_s`). Targets of
actions still in progress are left alone, but count: they hold their number, their GPUs and their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from controller.model import (
    Action,
    AddServer,
    BeginRetirement,
    ContainerState,
    CreateContainer,
    DeleteServer,
    Desired,
    FailureRecord,
    GiveUserConfig,
    Gpu,
    Health,
    Observed,
    PendingReplica,
    Plan,
    PullImage,
    RemoveContainer,
    ReplicaContainer,
    Retirement,
    Server,
    ServerState,
    ServiceSpec,
    SetServerState,
    SetServerWeight,
    SetWaitingRoom,
    ShutdownSessions,
    SignalContainer,
    StartContainer,
    Step,
    VersionGoal,
    WriteRouting,
    backend_name,
    goal_of,
    is_another_try,
    replica_name,
    service_address,
    socket_address,
)
from controller.phases import Phase, gets_traffic, is_ready, phase_of
from controller.placement import GpuLedger, Shortage
from controller.shares import Bounds, bounds, weights
from controller.swaps import Places, Swap, swap
from controller.user_config import digest, is_due, wanted_in

PROPAGATION_S = 0.25
"""An in-flight count of zero counts as drained when it was read this long after callers were told."""
BLIND_DRAIN_S = 2.0
"""Drain time of a replica that reports nothing, once HAProxy has nothing for it."""
FAILED_GRACE_S = 5.0
"""SIGTERM to SIGKILL for a replica that has failed or was never ready: it may not be listening (a process that has just
begun as a container's first ignores SIGTERM), and nobody waits for it."""
USUAL_DRAIN_S = 20.0
USUAL_GRACE_S = 30.0
"""Of a replica whose service is gone from the files and which does not say what it was made with."""
DRAIN_LOOK_S = 0.1
BACKOFF_MAX_S = 60.0


def plan(desired: Desired, observed: Observed, now: float) -> Plan:
    """Return the ordered difference of desired and observed at time `now` (seconds, same clock as the snapshot).

    A converged world gives an empty plan. Deterministic: the same arguments give the same text.
    """
    draft = _Draft(desired=desired, observed=observed, now=now, gpus=GpuLedger.of(observed, now))
    draft.write_routing()
    draft.set_waiting_rooms()
    draft.remove_strays()
    names = sorted({*desired.services, *observed.services})
    outlooks = [_Outlook.of(draft, name) for name in names]
    for outlook in outlooks:
        _finish(draft, outlook)
    for outlook in outlooks:
        _hold_for_next_try(draft, outlook)
    for outlook in outlooks:
        outlook.bounds = _bounds(draft, outlook)
    # GPUs are given out in this order: to those who follow somebody, to what is missing where versions change or
    # replicas failed, to what is missing elsewhere, and to who comes for a while in addition.
    for outlook in outlooks:
        _start_successors(draft, outlook)
    for outlook in outlooks:
        _retire(draft, outlook)
        _start_created(draft, outlook)
        _start_successors(draft, outlook)
    for outlook in sorted(outlooks, key=lambda outlook: not _mends(draft, outlook)):
        _start(draft, outlook, outlook.target - outlook.total())
    for outlook in outlooks:
        _start_rest(draft, outlook)
        _register(draft, outlook)
        _configure(draft, outlook)
    draft.delete_ghost_servers()
    return Plan(
        steps=tuple(draft.steps),
        pending=tuple(draft.pending),
        next_look_s=draft.next_look_s,
        awaits_gpu_memory=draft.gpus.awaits_memory,
    )


def backoff_s(failures: int) -> float:
    """Seconds between a failure and the next start: none after the first, then 1, 2, 4 ... up to 60."""
    return 0.0 if failures <= 1 else min(BACKOFF_MAX_S, 2.0 ** (failures - 2))


# -------------------------------------------------------------------------------------------------- one plan's material


@dataclass(slots=True)
class _Draft:
    desired: Desired
    observed: Observed
    now: float
    gpus: GpuLedger
    steps: list[Step] = field(default_factory=list)
    pending: list[PendingReplica] = field(default_factory=list)
    next_look_s: float | None = None
    routing_step: int | None = None
    busy: frozenset[str] = field(init=False)
    failed: list[RemoveContainer] = field(init=False)
    """Removals of replicas that have failed which go on."""
    routing_usable: bool = field(init=False)

    def __post_init__(self) -> None:
        in_progress = self.observed.in_progress
        self.busy = frozenset(action.target for action in in_progress)
        self.failed = [action for action in in_progress if isinstance(action, RemoveContainer) and action.failed]
        reloading = any(isinstance(action, WriteRouting) for action in in_progress)
        self.routing_usable = self.observed.routing is not None and not reloading

    def add(self, action: Action, *after: int | None) -> int:
        number = len(self.steps) + 1
        self.steps.append(Step(number, action, tuple(sorted({step for step in after if step is not None}))))
        return number

    def look_again_in(self, seconds: float) -> None:
        seconds = max(seconds, 0.01)
        self.next_look_s = seconds if self.next_look_s is None else min(self.next_look_s, seconds)

    def servers(self) -> tuple[Server, ...]:
        return self.observed.routing.servers if self.observed.routing and self.routing_usable else ()

    def server_of(self, service: str, name: str) -> Server | None:
        routing = self.observed.routing
        return routing.server_of(service, name) if routing and self.routing_usable else None

    def write_routing(self) -> None:
        routing = self.observed.routing
        if not self.routing_usable or routing is None or not self.desired.routing_hash:
            return
        if routing.routing_hash == self.desired.routing_hash:
            return
        routed = tuple(spec for _, spec in sorted(self.desired.services.items()) if spec.is_routed)
        cause = f"HAProxy runs routes {routing.routing_hash or 'none'}, the services need {self.desired.routing_hash}"
        action = WriteRouting(target="routing", services=routed, routing_hash=self.desired.routing_hash, cause=cause)
        self.routing_step = self.add(action)

    def set_waiting_rooms(self) -> None:
        """Of backends that HAProxy has. A process that begins has all of them open: they are closed again."""
        routing = self.observed.routing
        if not self.routing_usable or routing is None or self.routing_step is not None:
            return
        changing = {action.backend for action in self.observed.in_progress if isinstance(action, SetWaitingRoom)}
        for name in sorted(self.desired.services):
            backend, is_open = backend_name(name), name not in self.desired.switched_off
            if backend not in routing.backends or backend in changing or is_open == (backend not in routing.closed):
                continue
            cause = "it shall have replicas again" if is_open else "0 wanted, and no request wakes it"
            self.add(SetWaitingRoom(target=name, service=name, backend=backend, is_open=is_open, cause=cause))

    def remove_strays(self) -> None:
        for stray in sorted(self.observed.strays, key=lambda stray: stray.name):
            if stray.name in self.busy or stray.service not in self.desired.services:
                continue
            cause = f"started by Compose, which pins no GPU: use `make scale SERVICE={stray.service} N=...` instead"
            self.add(
                RemoveContainer(
                    target=stray.name, service=stray.service, container_id=stray.id, force=True, cause=cause
                )
            )

    def delete_server(self, server: Server, service: str, cause: str, *, force: bool = False) -> int:
        """Take a server out for good: maint, end its sessions, delete. Returns the last step's number."""
        last: int | None = None
        names = {"target": server.name, "service": service, "backend": server.backend, "cause": cause}
        if server.state is not ServerState.MAINT:
            last = self.add(SetServerState(**names, state=ServerState.MAINT))
        if force or server.sessions:
            last = self.add(ShutdownSessions(**names), last)
        return self.add(DeleteServer(**names), last)

    def delete_ghost_servers(self) -> None:
        known = {(backend_name(c.service), c.name) for c in self.observed.containers}
        for server in sorted(self.servers(), key=lambda server: (server.backend, server.name)):
            if (server.backend, server.name) not in known and server.name not in self.busy:
                service = server.backend.removeprefix(backend_name(""))
                self.delete_server(server, service, "no container of that name exists")


@dataclass(frozen=True, slots=True)
class _Replica:
    container: ReplicaContainer
    phase: Phase
    detail: str
    retirement: Retirement | None
    outdated: bool
    busy: bool
    is_reached: bool
    """Whether requests from outside would get to it."""

    @property
    def name(self) -> str:
        return self.container.name

    @property
    def is_ready(self) -> bool:
        return is_ready(self.container, self.phase)

    @property
    def serves(self) -> bool:
        return self.is_ready and self.is_reached


@dataclass(slots=True)
class _Outlook:
    """One service as the plan sees it. `leaving` are ids of containers that are being, or by this plan will be, retired
    or removed."""

    name: str
    spec: ServiceSpec | None
    target: int
    goal: VersionGoal
    replicas: tuple[_Replica, ...]
    creating: tuple[CreateContainer, ...]
    leaving: set[str] = field(default_factory=set)
    removal_steps: dict[str, int] = field(default_factory=dict)
    """Replica name -> the step that removes its container."""
    bounds: Bounds | None = None
    """While versions change."""
    planned: list[CreateContainer] = field(default_factory=list)
    """What this plan makes."""
    room: int = 0
    """How many replicas this machine has room for, while versions change."""
    reachable: int = 0
    """How many of the target there can be, of whatever version, while versions change."""
    has_place: bool = True
    """False when the new version finds no place, and would find none if as many went as may."""
    held: dict[str | None, int] = field(default_factory=dict)
    """By version: replicas that cannot be made yet and for which this plan keeps a place."""
    numbers: _Numbers | None = None
    """Which numbers new replicas may have; None = to be worked out."""
    _alive: tuple[int, list[_Replica]] | None = None

    @property
    def version(self) -> str | None:
        return self.goal.version

    @classmethod
    def of(cls, draft: _Draft, name: str) -> _Outlook:
        spec = draft.desired.services.get(name)
        goal = goal_of(draft.desired, draft.observed, name)
        busy = draft.busy
        replicas = []
        for container in draft.observed.containers_of(name):
            retirement = draft.observed.retirements.get(container.id)
            phase, detail = phase_of(container, spec, retirement, draft.now)
            outdated = goal.version is not None and container.version != goal.version
            reached = gets_traffic(container, spec, draft.observed.routing)
            replicas.append(_Replica(container, phase, detail, retirement, outdated, container.name in busy, reached))
        # A replacement has the name of the one it follows: until that is gone, the name is not yet the new one's.
        seen = {replica.name for replica in replicas if replica.phase.serves_or_will}
        creating = tuple(
            action
            for action in draft.observed.in_progress
            if isinstance(action, CreateContainer) and action.service == name and action.target not in seen
        )
        leaving = {
            action.container_id
            for action in draft.observed.in_progress
            if isinstance(action, BeginRetirement | RemoveContainer) and action.service == name
        }
        target = draft.desired.targets.get(name, spec.replicas) if spec else 0
        return cls(name, spec, target, goal, tuple(replicas), creating, leaving)

    def alive(self) -> list[_Replica]:
        """Replicas that count towards the target and stay after what is planned so far."""
        # Asked for several times a replica; it changes only when another one leaves.
        if self._alive is None or self._alive[0] != len(self.leaving):
            stay = [r for r in self.replicas if r.phase.serves_or_will and r.container.id not in self.leaving]
            self._alive = (len(self.leaving), stay)
        return list(self._alive[1])

    def without(self, gone: Iterable[_Replica] = ()) -> tuple[int, int]:
        """How many serve, and how many are ready by their own word, once these have gone.

        Who is ready and not reached by HAProxy serves nobody. But HAProxy may reach all of them the next moment (it has
        just been started, its checks have not passed yet), so they count where it is asked how many may go.
        """
        names = {replica.name for replica in gone}
        stay = [replica for replica in self.alive() if replica.name not in names]
        return sum(replica.serves for replica in stay), sum(replica.is_ready for replica in stay)

    def made_as(self, version: str | None) -> int:
        """Replicas of a version that are there and stay, or are being made."""
        alive = sum(replica.container.version == version for replica in self.alive())
        return alive + sum(action.version == version for action in (*self.creating, *self.planned))

    def total(self) -> int:
        """Replicas that are there and stay, are being made, or are made by this plan."""
        return len(self.alive()) + len(self.creating) + len(self.planned)

    def lacking(self) -> int:
        """Replicas of the wanted version that are to be started now."""
        wanted, ceiling = self.target, self.target
        if self.bounds:
            wanted, ceiling = min(wanted, self.bounds.goal), self.bounds.ceiling
        return max(0, min(wanted - self.made_as(self.version), ceiling - self.total()))

    def kept_lacking(self) -> int:
        """Replicas of the kept version that are to be started now.

        While a version is tried, replicas of the one that works are replaced as they were: the new one is not proven.
        """
        keep, limits = self.goal.keep, self.bounds
        if keep is None or limits is None or self.goal.keep_spec is None:
            return 0
        alive = self.alive()
        of_goal = sum(replica.serves and not replica.outdated for replica in alive)
        wanted = max(limits.keep, limits.floor - of_goal)
        return max(0, min(wanted - self.made_as(keep), limits.ceiling - self.total()))

    def here(self) -> int:
        """Replicas on this machine, those to come among them, without those that this plan removes."""
        return len(self.replicas) - len(self.removal_steps) + len(self.creating) + len(self.planned)

    def going(self) -> list[_Replica]:
        """Those who are on their way out, and still have what they have."""
        staying = {replica.name for replica in self.alive()}
        return [
            replica
            for replica in self.replicas
            if replica.name not in staying and replica.name not in self.removal_steps
            if replica.retirement is not None or replica.container.id in self.leaving
        ]


# ----------------------------------------------------------------------------------------------------------- 1. finish


def _finish(draft: _Draft, outlook: _Outlook) -> None:
    for replica in outlook.replicas:
        if replica.busy:
            continue
        match replica.phase:
            case Phase.DRAINING:
                _drain(draft, outlook, replica)
            case Phase.STOPPING:
                _await_exit(draft, outlook, replica)
            case Phase.STOPPED:
                cause = replica.retirement.cause if replica.retirement else "it was told to stop"
                failed = bool(replica.retirement and replica.retirement.failed)
                _remove(draft, outlook, replica, cause, failed=failed)
            case Phase.FAILED if not replica.container.state.is_up:
                if replica.container.state is not ContainerState.REMOVING:
                    _remove(draft, outlook, replica, replica.detail, failed=True)
            case _:
                pass


def _drain(draft: _Draft, outlook: _Outlook, replica: _Replica) -> None:
    retirement = replica.retirement
    if retirement is None:
        raise AssertionError("internal: a replica drains without a retirement")
    server = draft.server_of(outlook.name, replica.name)
    if server and server.state is ServerState.READY:
        _set_server(draft, outlook, replica, ServerState.DRAIN, retirement.cause)
    why = _drained(draft, outlook, replica, retirement, server)
    if why is None:
        draft.look_again_in(DRAIN_LOOK_S)
        return
    _signal(draft, outlook, replica, "SIGTERM", f"{retirement.cause}; {why}")


def _drained(
    draft: _Draft, outlook: _Outlook, replica: _Replica, retirement: Retirement, server: Server | None
) -> str | None:
    """Return why the replica may be stopped now, or None while it must be waited for."""
    container = replica.container
    waited_s = draft.now - retirement.draining_since
    limit_s = _drain_s(outlook, container)
    if waited_s >= limit_s:
        return f"still busy after {limit_s:g} s (graceful_shutdown_timeout_s)"
    if container.health is not Health.READY and (retirement.failed or not _may_be_at_work(draft, outlook, replica)):
        return "it serves nobody: it is not ready"
    if retirement.failed and container.stalled_since is not None:
        return "it makes no progress"
    routed = outlook.spec is not None and outlook.spec.is_routed
    if routed and not draft.routing_usable:
        return None  # HAProxy is being restarted or reloaded: whether it still sends requests here cannot be known
    if server and (server.state is ServerState.READY or server.sessions or server.queued):
        return None
    stay_s = outlook.spec.graceful_shutdown_wait_loop_s if outlook.spec else None
    if container.ongoing is not None and container.ongoing_at is not None:
        # Not only that it has stayed: callers that have not heard of it may have begun something meanwhile.
        fresh = container.ongoing_at >= retirement.draining_since + (PROPAGATION_S if stay_s is None else stay_s)
        return "nothing in flight" if fresh and container.ongoing == 0 else None
    if outlook.spec is None:
        return None  # its backend is gone, so HAProxy's earlier worker finishes what it has, and tells nobody how much
    least_s = BLIND_DRAIN_S if stay_s is None else stay_s
    return "nothing in flight that HAProxy knows of" if waited_s >= least_s else None


def _may_be_at_work(draft: _Draft, outlook: _Outlook, replica: _Replica) -> bool:
    """Whether one that is not ready may have requests that it can finish: by its own word, or by HAProxy's.

    One that was never ready has none. One that was, and does not answer while it finishes them, is slow as often as it
    is dead; who is dead ends by itself, or its clients give up.
    """
    container = replica.container
    if container.ongoing:
        return True
    if container.health is Health.UNKNOWN or outlook.spec is None or not outlook.spec.is_routed:
        return False
    server = draft.server_of(outlook.name, replica.name)
    return not draft.routing_usable or (server is not None and bool(server.sessions or server.queued))


def _drain_s(outlook: _Outlook, container: ReplicaContainer) -> float:
    """How long it may go on with its requests."""
    now_s = outlook.spec.graceful_shutdown_timeout_s if outlook.spec else None
    return _patience_s(outlook, container, now_s, container.graceful_shutdown_timeout_s, USUAL_DRAIN_S)


def _grace_s(outlook: _Outlook, container: ReplicaContainer) -> float:
    """The time from SIGTERM to SIGKILL."""
    now_s = outlook.spec.stop_grace_period_s if outlook.spec else None
    return _patience_s(outlook, container, now_s, container.stop_grace_period_s, USUAL_GRACE_S)


def _patience_s(
    outlook: _Outlook, container: ReplicaContainer, now_s: float | None, made_with_s: float | None, usual_s: float
) -> float:
    """As the wanted version says, where it is of that one; else the longer of that and what it was made with: its
    requests have begun with its own limits, and what is said of another version may be shorter than these.
    """
    if now_s is not None and container.version == outlook.version:
        return now_s
    said = [seconds for seconds in (now_s, made_with_s) if seconds is not None]
    return max(said, default=usual_s)


def _await_exit(draft: _Draft, outlook: _Outlook, replica: _Replica) -> None:
    retirement = replica.retirement
    if retirement is None or retirement.stopping_since is None:
        raise AssertionError("internal: a replica stops without a time of its SIGTERM")
    grace_s = _grace_s(outlook, replica.container)
    never_served = replica.container.health is Health.UNKNOWN and not replica.container.reported_draining
    if retirement.failed or never_served:
        grace_s = min(grace_s, FAILED_GRACE_S)
    left_s = retirement.stopping_since + grace_s - draft.now
    if left_s > 0 and _missed_its_signal(draft, outlook, replica, retirement.stopping_since):
        _signal(draft, outlook, replica, "SIGTERM", f"{retirement.cause}; it was not listening yet when first told")
    elif left_s > 0:
        draft.look_again_in(left_s)
    else:
        _signal(draft, outlook, replica, "SIGKILL", f"{retirement.cause}; still running {grace_s:g} s after SIGTERM")
        draft.look_again_in(1.0)


def _missed_its_signal(draft: _Draft, outlook: _Outlook, replica: _Replica, told_at: float) -> bool:
    """Whether a replica goes on as if nobody had told it.

    A container's first process ignores SIGTERM until it has a handler, which is after its imports. One that heard says
    so in its answers; one that never does is not told for ever.
    """
    container = replica.container
    heard = container.health is not Health.READY or container.reported_draining
    managed = outlook.spec is not None and outlook.spec.managed
    return managed and not heard and FAILED_GRACE_S <= draft.now - told_at < 2 * FAILED_GRACE_S


def _signal(
    draft: _Draft, outlook: _Outlook, replica: _Replica, signal: Literal["SIGTERM", "SIGKILL"], cause: str
) -> None:
    draft.add(
        SignalContainer(
            target=replica.name,
            service=outlook.name,
            container_id=replica.container.id,
            signal=signal,
            cause=cause,
        )
    )


def _remove(draft: _Draft, outlook: _Outlook, replica: _Replica, cause: str, *, failed: bool) -> None:
    server = draft.server_of(outlook.name, replica.name)
    server_step = draft.delete_server(server, outlook.name, cause) if server else None
    container = replica.container
    action = RemoveContainer(
        target=replica.name,
        service=outlook.name,
        container_id=container.id,
        failed=failed,
        version=container.version,
        began_at=container.created_at if container.started_at is None else container.started_at,
        cause=cause,
    )
    step = draft.add(action, server_step)
    outlook.leaving.add(replica.container.id)
    outlook.removal_steps[replica.name] = step
    outlook.numbers = None
    draft.gpus.free_after(replica.container, step)


# ----------------------------------------------------------------------------------------------------------- 2. retire


def _retire(draft: _Draft, outlook: _Outlook) -> None:
    for replica in outlook.replicas:
        if replica.phase is Phase.FAILED and replica.container.state.is_up and not replica.busy:
            if _serves_in_spite(replica) and not _has_gpu_elsewhere(draft, outlook):
                continue
            _begin_retirement(draft, outlook, replica, replica.detail, failed=True)
    for replica, cause in _superfluous(draft, outlook):
        if replica.busy:
            continue
        if replica.phase is Phase.CREATED:
            _remove(draft, outlook, replica, cause, failed=False)
        else:
            _begin_retirement(draft, outlook, replica, cause, failed=False)


def _serves_in_spite(replica: _Replica) -> bool:
    """Whether a replica answers although its GPU is said to be gone: the engine's list may be wrong, too."""
    container = replica.container
    return bool(container.gpu_fault) and container.health is Health.READY


def _has_gpu_elsewhere(draft: _Draft, outlook: _Outlook) -> bool:
    spec = outlook.spec
    if spec is None or spec.gpu is None:
        return True
    return draft.gpus.room(outlook.name, spec.gpu, 1) == 1


def _superfluous(draft: _Draft, outlook: _Outlook) -> list[tuple[_Replica, str]]:
    """Choose who goes: outdated replicas as far as readiness allows, then those above the target.

    A ready outdated one goes only while enough others are ready, so the last ready one never goes first. Of a version
    that is kept while another one is tried, as many stay as the trial needs.
    """
    alive = outlook.alive()
    current = [replica for replica in alive if not replica.outdated]
    surplus = len(current) - outlook.target
    # Creations in progress count towards the target but cannot be taken back: wait until they are there.
    above = _least_useful_first(current)[: max(surplus, 0)]
    return [*_outdated(draft, outlook), *((replica, _scale_cause(outlook)) for replica in above)]


def _outdated(draft: _Draft, outlook: _Outlook) -> list[tuple[_Replica, str]]:
    """Choose the outdated ones who go. Beyond what there is too much of, only those go whose successors find room."""
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
        outlook.bounds = limits = _bounds(draft, outlook, has_place=False) or limits
        chosen, _ = _may_go(outlook, limits)
    else:
        names = {container.name for container in found.victims}
        chosen += [replica for replica in others if replica.name in names]
    cause = _outdated_cause(outlook, limits)
    return [(replica, cause) for replica in chosen]


def _may_go(outlook: _Outlook, limits: Bounds) -> tuple[list[_Replica], list[_Replica]]:
    """Who goes in any case, and who may go for a successor."""
    outdated = [replica for replica in outlook.alive() if replica.outdated]
    kept = [replica for replica in outdated if replica.container.version == outlook.goal.keep]
    others = [replica for replica in outdated if replica.container.version != outlook.goal.keep]
    spare = max(0, len(kept) - limits.keep)
    sure: list[_Replica] = []
    maybe: list[_Replica] = []
    least = max(limits.floor, outlook.reachable)
    serving, ready = outlook.without()
    for replica in [*_least_useful_first(others), *_least_useful_first(kept)[:spare]]:
        # One that HAProxy does not reach takes nothing from those who serve, however few they are.
        if not replica.is_ready or (ready > least and (serving > least or not replica.serves)):
            sure.append(replica)
            serving -= replica.serves
            ready -= replica.is_ready
        else:
            maybe.append(replica)
    return sure, maybe


def _at_a_time(
    outlook: _Outlook, limits: Bounds, gone: list[_Replica], others: list[_Replica]
) -> tuple[list[_Replica], int]:
    """Who of the others may go for successors now, beside `gone`, and how many of them."""
    serving, ready = outlook.without(gone)
    if serving > limits.floor:
        return others, serving - limits.floor
    return [replica for replica in others if not replica.serves], max(0, ready - limits.floor)


def _swap(
    draft: _Draft,
    outlook: _Outlook,
    spec: ServiceSpec,
    limits: Bounds,
    *,
    gone: list[_Replica],
    candidates: list[_Replica],
    most: int,
    fewest: bool = False,
) -> Swap:
    """Try out who of the candidates has to go for replicas of the wanted version to find a place, once `gone` are.

    `fewest`: for one of them only.
    """
    goal, made = outlook.goal, outlook.made_as(outlook.version) + outlook.held.get(outlook.version, 0)
    total = outlook.total() - len(gone) - min(most, len(candidates))
    count = max(0, min(limits.goal - made, limits.ceiling - total, 1 if fewest else limits.goal))
    kept = 0 if goal.keep_spec is None else max(0, limits.keep - outlook.made_as(goal.keep))
    if count and (goal.spec is None or goal.version is None):
        return Swap((), has_place=False)
    if not count and not candidates:
        return Swap((), has_place=True)
    left = None if spec.max_replicas_per_node is None else spec.max_replicas_per_node - outlook.here()
    leaving = [replica.container for replica in (*outlook.going(), *gone)]
    places = Places.after(draft.gpus, outlook.name, leaving, left)
    return swap(
        places,
        [replica.container for replica in candidates],
        (count, (goal.spec or spec).gpu),
        (kept, goal.keep_spec.gpu if goal.keep_spec else None),
        most,
    )


def _outdated_cause(outlook: _Outlook, limits: Bounds) -> str:
    if not outlook.target:
        return _scale_cause(outlook)
    cause = f"its version is not {outlook.version}"
    return f"{cause}; no GPU is free for one more, so they are replaced one by one" if limits.one_by_one else cause


def _least_useful_first(replicas: Iterable[_Replica]) -> list[_Replica]:
    """Those that do not serve yet, then those with the least to finish; of equals the youngest number."""
    order = {Phase.CREATED: 0, Phase.STARTING: 1, Phase.RUNNING: 2}

    def usefulness(replica: _Replica) -> tuple[int, bool, int, int, str]:
        container = replica.container
        return order[replica.phase], replica.serves, container.ongoing or 0, -container.number, replica.name

    return sorted(replicas, key=usefulness)


def _scale_cause(outlook: _Outlook) -> str:
    if outlook.spec is None:
        return f"the compose files have no service {outlook.name} any more"
    return f"{len(outlook.alive())} replicas, {outlook.target} wanted"


def _begin_retirement(draft: _Draft, outlook: _Outlook, replica: _Replica, cause: str, *, failed: bool) -> None:
    server = draft.server_of(outlook.name, replica.name)
    if server:
        wanted = ServerState.MAINT if failed else ServerState.DRAIN
        if server.state is not wanted:
            _set_server(draft, outlook, replica, wanted, cause)
    draft.add(
        BeginRetirement(
            target=replica.name, service=outlook.name, container_id=replica.container.id, failed=failed, cause=cause
        )
    )
    outlook.leaving.add(replica.container.id)
    draft.look_again_in(DRAIN_LOOK_S)


def _set_server(draft: _Draft, outlook: _Outlook, replica: _Replica, state: ServerState, cause: str) -> None:
    draft.add(
        SetServerState(
            target=replica.name, service=outlook.name, backend=backend_name(outlook.name), state=state, cause=cause
        )
    )


# ------------------------------------------------------------------------------------------------------------ 3. start


def _mends(draft: _Draft, outlook: _Outlook) -> bool:
    """Whether a service misses replicas that it had, as far as can be told: its versions change, or one failed."""
    failed = (
        (outlook.name, version or "") in draft.observed.failures for version in (outlook.version, outlook.goal.keep)
    )
    return outlook.bounds is not None or any(failed)


def _start_created(draft: _Draft, outlook: _Outlook) -> None:
    for replica in outlook.alive() if outlook.spec else ():
        if replica.phase is Phase.CREATED and not replica.busy:
            cause = "created and never started"
            draft.add(StartContainer(target=replica.name, service=outlook.name, cause=cause))


def _start_successors(draft: _Draft, outlook: _Outlook) -> None:
    """Start as many as are removed, or are about to be; where these are still in the way, keep what else it takes."""
    going = outlook.going()
    _start(draft, outlook, len(outlook.removal_steps) + len(going) - len(outlook.planned) - sum(outlook.held.values()))
    if going:
        _hold_for_successors(draft, outlook, going)


def _start(draft: _Draft, outlook: _Outlook, most: int) -> Shortage | None:
    """Plan what is missing, `most` replicas at most; return why not when this machine has no place for it."""
    spec = outlook.spec
    if spec is None or most <= 0:
        return None
    most -= _restore_kept(draft, outlook, most)
    lacking = min(outlook.lacking() - outlook.held.get(outlook.version, 0), most)
    if lacking <= 0 or _obstacle(draft, outlook, spec) is not None:
        return None
    cause = _start_cause(outlook, draft.observed.failures.get((outlook.name, outlook.version or "")))
    for _ in range(lacking):
        shortage = _create(draft, outlook, outlook.goal.spec or spec, outlook.version, cause)
        if shortage is not None:
            return shortage
    return None


def _start_rest(draft: _Draft, outlook: _Outlook) -> None:
    """Plan what else there may be, and say why what is missing then cannot be started."""
    spec = outlook.spec
    if spec is None:
        return
    _pull_image(draft, outlook, spec)
    outlook.held.clear()  # whoever had to wait for them has waited
    shortage = _start(draft, outlook, outlook.lacking() + outlook.kept_lacking())
    missing = outlook.lacking()
    if not missing:
        return
    obstacle = _obstacle(draft, outlook, spec)
    if shortage is None:
        if obstacle is None:
            raise AssertionError("internal: a replica that could be started was not")
        to_be_built = outlook.version is None and spec.has_build
        pending = PendingReplica(outlook.name, obstacle, blocked=to_be_built)
    else:
        words = shortage.reason + _shortage_remedy(outlook) + _faults_words(draft)
        pending = PendingReplica(outlook.name, words, shortage.blocked, has_no_place=True)
    draft.pending += [pending] * missing


def _restore_kept(draft: _Draft, outlook: _Outlook, most: int) -> int:
    """Replace replicas of the version that is kept. Returns how many that adds."""
    keep, keep_spec = outlook.goal.keep, outlook.goal.keep_spec
    missing = min(outlook.kept_lacking() - outlook.held.get(keep, 0), most)
    if missing <= 0 or keep_spec is None or _backing_off(draft, outlook.name, keep or "") is not None:
        return 0
    for restored in range(missing):
        cause = f"{keep} goes on serving while {outlook.version} is tried"
        if _create(draft, outlook, keep_spec, keep, cause) is not None:
            return restored  # no GPU: the new version holds it, or somebody else; either is told elsewhere
    return missing


def _hold_for_next_try(draft: _Draft, outlook: _Outlook) -> None:
    """Keep the places of replicas that failed and wait for their next try: nobody else gets them meanwhile."""
    goal, spec = outlook.goal, outlook.spec
    if spec is None:
        return
    missing = outlook.target - outlook.total()
    begins = goal.keep is not None and not outlook.made_as(goal.version)
    if goal.version and _backing_off(draft, outlook.name, goal.version) is not None:
        _hold(draft, outlook, goal.version, goal.spec or spec, max(missing, int(begins)))
    elif goal.keep and goal.keep_spec and _backing_off(draft, outlook.name, goal.keep) is not None:
        # The first one of the new version may have such a place: it may be the cure.
        _hold(draft, outlook, goal.keep, goal.keep_spec, missing - int(begins))


def _hold(draft: _Draft, outlook: _Outlook, version: str, spec: ServiceSpec, count: int) -> None:
    for _ in range(count):
        if spec.gpu is None or not spec.gpu.count or not draft.gpus.place(outlook.name, spec.gpu):
            return
        outlook.held[version] = outlook.held.get(version, 0) + 1


def _hold_for_successors(draft: _Draft, outlook: _Outlook, going: list[_Replica]) -> None:
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


def _bounds(draft: _Draft, outlook: _Outlook, *, has_place: bool = True) -> Bounds | None:
    """How many replicas of which version there may be now; None when versions do not change. Before anything starts."""
    spec, goal = outlook.spec, outlook.goal
    if spec is None or not (goal.keep or any(replica.outdated for replica in outlook.alive())):
        return None
    outlook.has_place = has_place
    if has_place:
        outlook.room = _room(draft, outlook, goal.spec or spec)
        kept = _room(draft, outlook, goal.keep_spec) if goal.keep_spec else outlook.room
        outlook.reachable = min(outlook.target, max(outlook.room, kept))
    return bounds(
        outlook.target,
        spec.rollout,
        on_trial=goal.keep is not None,
        room=outlook.room,
        reachable=outlook.reachable,
        has_place=has_place,
    )


def _room(draft: _Draft, outlook: _Outlook, spec: ServiceSpec) -> int:
    """How many replicas of the service fit on this machine, those that are there included; no more than are needed."""
    present = outlook.here() + sum(outlook.held.values())
    room = max(present, outlook.target + spec.rollout.max_surge)
    if spec.gpu is not None and spec.gpu.count:
        room = present + draft.gpus.room(outlook.name, spec.gpu, room - present)
    return room if spec.max_replicas_per_node is None else min(room, spec.max_replicas_per_node)


def _shortage_remedy(outlook: _Outlook) -> str:
    spec, ready = outlook.spec, sum(replica.serves and replica.outdated for replica in outlook.alive())
    if spec is None or outlook.has_place or not ready:
        return ""
    unavailable = spec.rollout.max_unavailable
    if unavailable < ready == 1:
        return "; the only replica stays until then, unless x-serve.rollout.max_unavailable is 1"
    return (
        f"; the {ready} that serve stay, as {max(unavailable, 1)} less would not make room: raise "
        "x-serve.rollout.max_unavailable, or ask for less"
    )


def _faults_words(draft: _Draft) -> str:
    faults = sorted(draft.observed.gpu_faults)
    if not faults:
        return ""
    return f"; not used because of a fault: {', '.join(faults)} (`pierhead status` says why, `pierhead unmark` ends it)"


def _pull_image(draft: _Draft, outlook: _Outlook, spec: ServiceSpec) -> None:
    """Fetch an image that is not there, also when nothing is to be started: else nobody knows the new version."""
    image_missing = spec.image in draft.observed.images and draft.observed.images[spec.image] is None
    if image_missing and outlook.target and not spec.has_build and outlook.name not in draft.busy:
        cause = "a replica is to be started and the image is not on this machine"
        cause = cause if outlook.lacking() else "without it nobody can tell the service's new version"
        draft.add(PullImage(target=outlook.name, service=outlook.name, image=spec.image, cause=cause))


def _obstacle(draft: _Draft, outlook: _Outlook, spec: ServiceSpec) -> str | None:
    """Return why nothing of this service can be started now, or None."""
    if outlook.version is None:
        if spec.has_build:
            return f"image {spec.image} is not on this machine: build it (`make build`)"
        return f"image {spec.image} is not on this machine: it is being pulled"
    if outlook.goal.spec is None:
        return f"nobody remembers how version {outlook.version} is made: `pierhead deploy` takes what the files give"
    return _backing_off(draft, outlook.name, outlook.version)


def _backing_off(draft: _Draft, service: str, version: str) -> str | None:
    """Return why a version that failed is not started again yet, or None."""
    failure = _failure(draft, service, version)
    if failure is None:
        return None
    left_s = failure.last_at + backoff_s(failure.count) - draft.now
    if left_s <= 0:
        return None
    draft.look_again_in(left_s)
    return f"failed {failure.count} times in a row, next try in {math.ceil(left_s)} s; last: {failure.detail}"


def _failure(draft: _Draft, service: str, version: str) -> FailureRecord | None:
    """How often a version has failed by now. What is kept counts a replica when it is gone, this also before."""
    failure = draft.observed.failures.get((service, version))
    for action in draft.failed:
        if (action.service, action.version) == (service, version) and is_another_try(failure, action.began_at):
            return FailureRecord(failure.count + 1 if failure else 1, draft.now, action.cause)
    return failure


def _start_cause(outlook: _Outlook, failure: FailureRecord | None) -> str:
    cause = f"{len(outlook.alive()) + len(outlook.creating)} of {outlook.target} replicas exist"
    former = sorted({replica.container.version for replica in outlook.alive() if replica.outdated})
    if former:
        return f"version {outlook.version} replaces {', '.join(former)}"
    if failure is not None:
        return f"{cause}; failure {failure.count}: {failure.detail}"
    return cause


def _create(draft: _Draft, outlook: _Outlook, spec: ServiceSpec, version: str | None, cause: str) -> Shortage | None:
    """Add the steps for one new replica; return why not when this machine has no place for it."""
    if version is None:
        raise AssertionError("internal: a replica is created without a version")
    if outlook.numbers is None:
        outlook.numbers = _Numbers.of(outlook)
    here, most = outlook.numbers.here, spec.max_replicas_per_node
    if most is not None and here >= most:
        there = "1 replica is" if here == 1 else f"{here} replicas are"
        return Shortage(f"{there} on this machine and max_replicas_per_node is {most}: raise it, or ask for fewer")
    number, predecessors = outlook.numbers.lowest_free()
    after = [outlook.removal_steps[replica.name] for replica in predecessors]
    gpus: tuple[Gpu, ...] = ()
    if spec.gpu is not None and spec.gpu.count:
        preferred = tuple(uuid for replica in predecessors for uuid in replica.container.gpus)
        granted = draft.gpus.take(outlook.name, spec.gpu, preferred)
        if isinstance(granted, Shortage):
            return granted
        gpus = granted.gpus
        after += granted.after
    outlook.numbers.give(number)
    name = replica_name(draft.desired.project, outlook.name, version, number)
    create = CreateContainer(
        target=name,
        service=outlook.name,
        version=version,
        number=number,
        gpus=gpus,
        gpu_slot=spec.gpu.slot if spec.gpu else None,
        spec=spec,
        cause=cause,
    )
    created = draft.add(create, *after)
    outlook.planned.append(create)
    draft.add(StartContainer(target=name, service=outlook.name, cause=cause), created)
    return None


@dataclass(slots=True)
class _Numbers:
    """The numbers of a service's replicas while new ones are planned: each takes the lowest that is free."""

    taken: set[int]
    leaving: dict[int, list[_Replica]]
    """By number: replicas that this plan removes."""
    here: int
    """Replicas on this machine, those to come among them."""
    _next: int = 1

    @classmethod
    def of(cls, outlook: _Outlook) -> _Numbers:
        leaving: dict[int, list[_Replica]] = {}
        for replica in outlook.replicas:
            if replica.name in outlook.removal_steps:
                leaving.setdefault(replica.container.number, []).append(replica)
        staying = [replica for replica in outlook.replicas if replica.name not in outlook.removal_steps]
        coming = {action.number for action in (*outlook.creating, *outlook.planned)}
        return cls({replica.container.number for replica in staying} | coming, leaving, here=outlook.here())

    def lowest_free(self) -> tuple[int, list[_Replica]]:
        """The next number, and those that had it and leave."""
        while self._next in self.taken:
            self._next += 1
        return self._next, self.leaving.get(self._next, [])

    def give(self, number: int) -> None:
        self.taken.add(number)
        self.here += 1


# --------------------------------------------------------------------------------------------------------- 4. register


def _register(draft: _Draft, outlook: _Outlook) -> None:
    spec = outlook.spec
    if spec is None or not spec.is_routed or not draft.routing_usable:
        return
    shares = _server_weights(outlook)
    for replica in outlook.alive():
        # A server whose replica is not known to be ready stays: HAProxy asks the same question and keeps traffic away,
        # while a controller that has just started, or a busy machine, must not take away what serves.
        server = draft.server_of(outlook.name, replica.name)
        if replica.busy:
            continue
        if replica.phase is Phase.RUNNING:
            _register_ready(draft, outlook, spec, replica, server, shares[int(replica.outdated)])
        elif server and server.address != service_address(replica.container, spec):
            # Of a container that had its name before: somebody else may have the address by now.
            draft.delete_server(server, outlook.name, "its replica is gone, another one has its name", force=True)


def _register_ready(
    draft: _Draft, outlook: _Outlook, spec: ServiceSpec, replica: _Replica, server: Server | None, weight: int
) -> None:
    address = service_address(replica.container, spec)
    if address is None:
        return
    deleted: int | None = None
    if server and server.address != address:
        deleted = draft.delete_server(server, outlook.name, f"the replica moved to {address}", force=True)
        server = None
    if server is None:
        add = AddServer(
            target=replica.name,
            service=outlook.name,
            backend=backend_name(outlook.name),
            address=address,
            weight=weight,
            cause="its replica is ready",
        )
        draft.add(add, draft.routing_step if _needs_reload(draft, add.backend) else None, deleted)
    elif server.state is not ServerState.READY:
        _set_server(draft, outlook, replica, ServerState.READY, "its replica is ready")
    elif server.weight != weight:
        percent = outlook.goal.weight
        cause = f"{outlook.version} is tried with {percent} % of the requests" if percent else "no version is tried"
        names = {"target": replica.name, "service": outlook.name, "backend": server.backend, "cause": cause}
        draft.add(SetServerWeight(**names, weight=weight))


def _server_weights(outlook: _Outlook) -> tuple[int, int]:
    """Weight of a server of the wanted version, and of one of any other."""
    if outlook.goal.keep is None:
        return 1, 1
    serving = [replica.outdated for replica in outlook.alive() if replica.is_ready]
    return weights(outlook.goal.weight, serving.count(False), serving.count(True))


def _needs_reload(draft: _Draft, backend: str) -> bool:
    """Whether the backend comes only with the new routes: a reload that fails must not keep others from scaling."""
    return draft.observed.routing is None or backend not in draft.observed.routing.backends


# -------------------------------------------------------------------------------------------------------- 5. configure


def _configure(draft: _Draft, outlook: _Outlook) -> None:
    spec = outlook.spec
    for replica in outlook.alive():
        container = replica.container
        text = None if spec is None else wanted_in(container, spec, outlook.goal)
        if spec is None or text is None or replica.busy or container.ip is None or not is_due(container, text):
            continue
        former = container.user_config.wanted if container.user_config else "none"
        port = spec.probe.port if container.probe is None else container.probe[0]
        draft.add(
            GiveUserConfig(
                target=replica.name,
                service=outlook.name,
                container_id=container.id,
                address=socket_address(container.ip, port),
                text=text,
                cause=f"it was given {former}, and shall have {digest(text)}; no restart",
            )
        )
