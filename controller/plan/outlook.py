"""One service and its replicas as a plan sees them: which stay, leave or start, and how many the service lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..model.actions import BeginRetirement, CreateContainer, RemoveContainer
from ..model.desired import VersionGoal, goal_of
from ..model.nodes import fits
from ..model.phases import Phase, gets_traffic, is_ready, phase_of
from ..model.spec import ServiceSpec
from ..model.world import ContainerState, ReplicaContainer, Retirement
from .draft import Draft
from .shares import Bounds, bounds


@dataclass(frozen=True, slots=True)
class ReplicaOutlook:
    """One replica as the plan sees it."""

    container: ReplicaContainer
    phase: Phase
    detail: str
    retirement: Retirement | None
    displaced: bool
    """Whether it has to go elsewhere, because its node leaves."""
    outdated: bool
    """Whether another one is to take its place: it is displaced, or of another version."""
    busy: bool
    """Whether an action for it is in progress."""
    is_kept: bool
    """Whether it is left alone, because its state cannot be known."""
    is_reached: bool
    """Whether requests from outside would reach it."""

    @property
    def name(self) -> str:
        """The container's."""
        return self.container.name

    @property
    def is_ready(self) -> bool:
        """Ready by its own probe."""
        return is_ready(self.container, self.phase)

    @property
    def serves(self) -> bool:
        """Ready, and requests reach it."""
        return self.is_ready and self.is_reached

    @property
    def may_change(self) -> bool:
        """Whether anything may be planned for it."""
        return not (self.busy or self.is_kept)

    @property
    def waits_for_node(self) -> bool:
        """Whether the engine has no node for it so far."""
        return self.container.state is ContainerState.PENDING and not self.container.node

    def is_of(self, version: str | None) -> bool:
        """Whether it counts as one of that version: a displaced one does not."""
        return self.container.version == version and not self.displaced


@dataclass(slots=True)
class ServiceOutlook:
    """One service as the plan sees it. `leaving` are ids of containers that are being, or by this plan will be, retired
    or removed."""

    name: str
    spec: ServiceSpec | None
    target: int
    goal: VersionGoal
    replicas: tuple[ReplicaOutlook, ...]
    creating: tuple[CreateContainer, ...]
    leaving: set[str] = field(default_factory=set)
    removal_steps: dict[str, int] = field(default_factory=dict)
    """Replica name -> the step that removes its container."""
    bounds: Bounds | None = None
    """While versions change."""
    planned: list[CreateContainer] = field(default_factory=list)
    """Replicas that this plan creates."""
    woken: int = 0
    """Replicas that this plan wakes."""
    room: int = 0
    """How many replicas this machine has room for, while versions change."""
    reachable: int = 0
    """How many of the target there can be, of any version, while versions change."""
    has_place: bool = True
    """False if a replica of the new version would not fit even after all replicas that may leave have left."""
    held: dict[str | None, int] = field(default_factory=dict)
    """By version: replicas that cannot be created yet and for which this plan keeps a place."""
    most: int | None = None
    """How many replicas may be started, where services take turns on GPUs; None = any number."""
    turn: str = ""
    """Why not more, or who gives way to it when."""
    room_comes: bool = False
    """Whether another service gives way to it."""
    numbers: Numbers | None = None
    """The numbers of new replicas; None = not computed yet."""
    _alive: tuple[int, list[ReplicaOutlook]] | None = None

    @property
    def version(self) -> str | None:
        """The wanted version; None while its image is missing."""
        return self.goal.version

    @classmethod
    def of(cls, draft: Draft, name: str) -> ServiceOutlook:
        """Summarize the snapshot of a service."""
        spec = draft.desired.services.get(name)
        goal = goal_of(draft.desired, draft.observed, name)
        busy = draft.busy
        replicas = []
        for container in draft.observed.containers_of(name):
            retirement = draft.observed.retirements.get(container.id)
            phase, detail = phase_of(container, spec, retirement, draft.now)
            if phase is Phase.ASLEEP and container.id not in draft.observed.asleep:
                phase, retirement = Phase.STARTING, None  # it is being woken
            displaced = container.node in draft.leaving
            outdated = displaced or (goal.version is not None and container.version != goal.version)
            reached = gets_traffic(container, spec, draft.observed.routing)
            is_kept = bool(draft.observed.brake) or container.node in draft.unknown
            if is_kept and phase is Phase.FAILED and container.state.is_up:
                phase = Phase.STARTING  # it may be well: the fault may be on this side
            is_busy = container.name in busy
            replicas.append(
                ReplicaOutlook(container, phase, detail, retirement, displaced, outdated, is_busy, is_kept, reached)
            )
        # A replacement has the name of its predecessor: while that exists, the name is not the new container's.
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

    @property
    def started(self) -> int:
        """Replicas that this plan creates or wakes."""
        return len(self.planned) + self.woken

    def wake(self, woken: ReplicaOutlook) -> None:
        """Count a replica that sleeps as one that is being started."""
        awake = replace(woken, phase=Phase.STARTING, retirement=None, busy=True)
        self.replicas = tuple(awake if replica is woken else replica for replica in self.replicas)
        self._alive = None
        self.woken += 1

    def alive(self) -> list[ReplicaOutlook]:
        """Replicas that count towards the target and stay after what is planned so far."""
        # Read several times for each replica; it changes only when another one leaves.
        if self._alive is None or self._alive[0] != len(self.leaving):
            stay = [r for r in self.replicas if r.phase.serves_or_will and r.container.id not in self.leaving]
            self._alive = (len(self.leaving), stay)
        return list(self._alive[1])

    def without(self, gone: Iterable[ReplicaOutlook] = ()) -> tuple[int, int]:
        """(replicas that serve, replicas that are ready by their own probe) once these have gone.

        A ready replica that HAProxy does not reach serves no request. HAProxy may reach it soon (after its start its
        checks have not passed yet), so such replicas count towards how many others may go.
        """
        names = {replica.name for replica in gone}
        stay = [replica for replica in self.alive() if replica.name not in names]
        return sum(replica.serves for replica in stay), sum(replica.is_ready for replica in stay)

    def made_as(self, version: str | None) -> int:
        """Replicas of a version that exist and stay where they are, or are being created."""
        alive = sum(replica.is_of(version) for replica in self.alive())
        return alive + sum(action.version == version for action in (*self.creating, *self.planned))

    def total(self) -> int:
        """Replicas that exist and stay, are being created, or are created by this plan."""
        return len(self.alive()) + len(self.creating) + len(self.planned)

    def lacking(self) -> int:
        """How many replicas of the wanted version are to be started now."""
        wanted, ceiling = self.target, self.target
        if self.bounds:
            wanted, ceiling = min(wanted, self.bounds.goal), self.bounds.ceiling
        return max(0, min(wanted - self.made_as(self.version), ceiling - self.total()))

    def kept_lacking(self) -> int:
        """How many replicas of the kept version are to be started now.

        While a new version is on trial, lost replicas of the stable version are replaced.
        """
        keep, limits = self.goal.keep, self.bounds
        if keep is None or limits is None or self.goal.keep_spec is None:
            return 0
        alive = self.alive()
        of_goal = sum(replica.serves and not replica.outdated for replica in alive)
        wanted = max(limits.keep, limits.floor - of_goal)
        return max(0, min(wanted - self.made_as(keep), limits.ceiling - self.total()))

    def here(self) -> int:
        """Replicas on this machine, including those being created, without those that this plan removes."""
        return len(self.replicas) - len(self.removal_steps) + len(self.creating) + len(self.planned)

    def going(self) -> list[ReplicaOutlook]:
        """Replicas on their way out that still hold their GPUs."""
        staying = {replica.name for replica in self.alive()}
        return [
            replica
            for replica in self.replicas
            if replica.name not in staying and replica.name not in self.removal_steps
            if replica.phase is not Phase.ASLEEP
            if replica.retirement is not None or replica.container.id in self.leaving
        ]


@dataclass(slots=True)
class Numbers:
    """The numbers of a service's replicas while new ones are planned: each takes the lowest that is free."""

    taken: set[int]
    leaving: dict[int, list[ReplicaOutlook]]
    """By number: replicas that this plan removes."""
    here: int
    """Replicas on this machine, including those being created."""
    _next: int = 1

    @classmethod
    def of(cls, outlook: ServiceOutlook) -> Numbers:
        """Compute them before the first new replica is planned."""
        leaving: dict[int, list[ReplicaOutlook]] = {}
        for replica in outlook.replicas:
            if replica.name in outlook.removal_steps:
                leaving.setdefault(replica.container.number, []).append(replica)
        staying = [replica for replica in outlook.replicas if replica.name not in outlook.removal_steps]
        coming = {action.number for action in (*outlook.creating, *outlook.planned)}
        return cls({replica.container.number for replica in staying} | coming, leaving, here=outlook.here())

    def lowest_free(self) -> tuple[int, list[ReplicaOutlook]]:
        """The next number, and the replicas that had it and leave."""
        while self._next in self.taken:
            self._next += 1
        return self._next, self.leaving.get(self._next, [])

    def take(self, number: int) -> None:
        """Give this number to a new replica."""
        self.taken.add(number)
        self.here += 1


# ----------------------------------------------------------------------------------------------------
# Room: how many replicas of each version there may be during a rolling update, and how many fit on this machine.


def bounds_of(draft: Draft, outlook: ServiceOutlook, *, has_place: bool = True) -> Bounds | None:
    """Return the limits of a rolling update now; None when no version changes. Call it before anything starts."""
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


def _room(draft: Draft, outlook: ServiceOutlook, spec: ServiceSpec) -> int:
    """How many replicas of the service fit on this machine, present ones included; no more than are needed."""
    present = outlook.here() + sum(outlook.held.values())
    room = max(present, outlook.target + spec.rollout.max_surge)
    if spec.gpu is not None:
        room = present + draft.gpus.room(outlook.name, spec.gpu, room - present)
    allowed, left = allowed_left(draft, outlook, spec, outlook.here()), draft.machine.left(spec)
    room = room if allowed is None else min(room, outlook.here() + allowed)
    return room if left is None else min(room, outlook.here() + max(0, left))


def places_left(draft: Draft, outlook: ServiceOutlook, spec: ServiceSpec, here: int) -> int | None:
    """How many more replicas there is room for, GPUs apart; None = any number. `here`: replicas on this machine."""
    rooms = (allowed_left(draft, outlook, spec, here), draft.machine.left(spec))
    return min((room for room in rooms if room is not None), default=None)


def allowed_left(draft: Draft, outlook: ServiceOutlook, spec: ServiceSpec, here: int) -> int | None:
    """How many more replicas max_replicas_per_node allows; None = any number. `here`: replicas on this machine."""
    most = spec.max_replicas_per_node
    if most is None or not draft.observed.nodes:
        return None if most is None else most - here
    on = Counter(one.container.node for one in outlook.replicas if one.name not in outlook.removal_steps)
    without_node = on[""] + len(outlook.creating) + len(outlook.planned)
    return sum(max(0, most - on[name]) for name in open_nodes(draft, spec)) - without_node


def open_nodes(draft: Draft, spec: ServiceSpec) -> list[str]:
    """The nodes on which replicas of a service may be started."""
    return [node.name for node in draft.observed.nodes if node.takes_replicas and fits(node, spec.constraints)]
