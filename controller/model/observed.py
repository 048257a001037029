"""What the controller observes: one immutable snapshot of containers, GPUs, HAProxy and the store's notes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from .actions import Action, WakeReplica
from .machine import Machine
from .nodes import Node
from .spec import Spec
from .world import (
    FailureKey,
    FailureRecord,
    Gpu,
    GpuReading,
    ReplicaContainer,
    ReplicaHealth,
    Retirement,
    RouterSilence,
    RoutingState,
    StrayContainer,
    is_asleep,
)


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine's part of a snapshot; fields of containers that the probe fills in have their defaults."""

    containers: tuple[ReplicaContainer, ...] = ()
    strays: tuple[StrayContainer, ...] = ()
    images: Mapping[str, str | None] = field(default_factory=dict)
    """Image reference of a service -> image id; None = not on this machine."""
    gpus: tuple[Gpu, ...] = ()
    foreign_gpu_holders: Mapping[str, str] = field(default_factory=dict)
    """GPU UUID -> name of the container that holds it, for containers that are no replicas."""
    nodes: tuple[Node, ...] = ()
    """All of them, by name; none where the engine is one machine."""
    left_alone: Mapping[str, str] = field(default_factory=dict)
    """By name, why what has the project's label is not touched: it cannot be understood."""
    machine: Machine | None = None
    """What the machine has left; None = not known (several nodes, or unreadable), so starts are not bounded by it."""


@dataclass(frozen=True, slots=True)
class Observed(EngineState):
    """One snapshot: everything that the planner may know."""

    gpu_reading: GpuReading | None = None
    """None = the memory in use cannot be read: only the containers that hold a GPU are known."""
    routing: RoutingState | None = None
    """None = HAProxy does not answer, or its answers cannot be read."""
    router_problem: str = ""
    """Why HAProxy's answers cannot be read; "" = they can, or there are none."""
    router_silence: RouterSilence | None = None
    """None = HAProxy does not hang: it answers, or its process is not there."""
    retirements: Mapping[str, Retirement] = field(default_factory=dict)
    """By container id."""
    failures: Mapping[FailureKey, FailureRecord] = field(default_factory=dict)
    gpu_faults: Mapping[str, str] = field(default_factory=dict)
    """GPU UUID -> why no replica is to be placed on it."""
    unreached: frozenset[str] = frozenset()
    """Nodes on which nothing answers, although the engine hears of them: their replicas may work."""
    brake: str = ""
    """Why no replica may be removed or moved now; "" = it may be."""
    in_progress: tuple[Action, ...] = ()
    """Actions of earlier plans that have not ended; the planner plans nothing for their targets."""
    asleep: frozenset[str] = field(init=False, repr=False, compare=False)
    """Ids of the containers that sleep, and that no action in progress wakes."""
    _by_service: Mapping[str, tuple[ReplicaContainer, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the containers: each tick looks up the containers of a service several times."""
        found: dict[str, list[ReplicaContainer]] = {}
        for container in sorted(self.containers, key=lambda container: (container.number, container.name)):
            found.setdefault(container.service, []).append(container)
        object.__setattr__(self, "_by_service", {name: tuple(listed) for name, listed in found.items()})
        waking = {action.container_id for action in self.in_progress if isinstance(action, WakeReplica)}
        asleep = {one.id for one in self.containers if is_asleep(one, self.retirements.get(one.id))}
        object.__setattr__(self, "asleep", frozenset(asleep - waking))

    @property
    def services(self) -> AbstractSet[str]:
        """Names of the services that have containers."""
        return self._by_service.keys()

    def containers_of(self, service: str) -> tuple[ReplicaContainer, ...]:
        """The containers of one service, in the order of their numbers."""
        return self._by_service.get(service, ())

    def lasting_failures(self, service: str) -> Mapping[str, FailureRecord]:
        """By version, the failures of a service that no replica that was made later has overcome by being ready: why
        replicas are missing now. The others still count for the backoff.
        """
        return {
            version: failure
            for (name, version), failure in self.failures.items()
            if name == service
            and not any(
                container.version == version
                and container.health is ReplicaHealth.READY
                and container.created_at >= failure.last_at
                for container in self.containers_of(service)
            )
        }


NOT_LOOKED_YET = Observed()
"""Of a controller that has just been started."""


@dataclass(frozen=True, slots=True)
class WorldSnapshot:
    """One look at the world: a snapshot, and the spec that it was taken for."""

    spec: Spec
    observed: Observed
    unseen: str = ""
    """Why the containers could not be read; "" = they were read recently enough to plan from."""

    @property
    def complete(self) -> bool:
        """Whether decisions may be based on it. If not, it has the last reading, which status shows."""
        return not self.unseen

    def without(self, barred: Mapping[FailureKey, str]) -> WorldSnapshot:
        """The same, in which replicas of these versions are not ready, for the reason that is given."""
        if not barred:
            return self
        containers = tuple(
            replace(one, health=ReplicaHealth.UNKNOWN, health_detail=barred[one.service, one.version])
            if one.health is ReplicaHealth.READY and (one.service, one.version) in barred
            else one
            for one in self.observed.containers
        )
        return replace(self, observed=replace(self.observed, containers=containers))
