"""Assembles a snapshot from its parts: engine, HAProxy, probes, store, executor.

Engine and HAProxy are read outside the ticks (watch.py). A tick waits a moment for a fresh reading and then takes the
previous one. Reading the engine is expensive, so it happens only after a change (an engine event, an action that ended,
a timer). Reading HAProxy is one line on a socket and happens each tick.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from ..engines.base import ClusterEngine, EngineAction
from ..model.actions import Action, RemoveContainer
from ..model.observed import NOT_LOOKED_YET, EngineState, Observed, WorldSnapshot
from ..model.plan import Plan
from ..model.spec import Spec
from ..model.world import (
    ReplicaContainer,
    ReplicaHealth,
    Retirement,
    RoutingState,
    ServerState,
    adopting,
    current_version,
    restarted,
)
from ..outlive import Background
from ..storage.clock import ContainerTimes
from ..storage.store import StateStore
from .gpu_faults import with_fault
from .gpu_marks import GpuMarks
from .gpu_memory import GpuMemoryWatch
from .node_losses import NodeLosses
from .prober import Prober
from .router_silence import RouterWatch
from .watch import Watch, WatchReading

RELIABLE_S = 10.0
"""Oldest engine snapshot to plan from while its event stream is open: images and foreign containers send no events."""
UNRELIABLE_S = 1.0
"""The same while the stream is broken, or while the loop waits for something that sends no event."""
ROUTER_S = 0.05
"""Oldest answer of HAProxy to plan from without asking again: it reports no changes by itself."""
FIRST_ROUND_S = 3.0


class EngineSeen(NamedTuple):
    """The engine's part of a snapshot."""

    state: EngineState
    noted: frozenset[str]
    """Ids of the containers that the store had rows for when the reading began."""


EngineReading = WatchReading[Spec, EngineSeen]


EngineWatch = Watch[Spec, EngineSeen, EngineAction]


def engine_watch(
    engine: ClusterEngine,
    store: StateStore,
    background: Background,
    took: Callable[[float], None] = lambda seconds: None,
) -> EngineWatch:
    """Read an engine. `took` as in `Watch`."""

    async def read(spec: Spec) -> EngineSeen:
        noted = store.containers()
        images = frozenset(service.image for service in spec.services.values())
        return EngineSeen(await engine.observe(spec.project, frozenset(spec.services), images), noted)

    return Watch("the Docker Engine", read, background, limit_s=50.0, stale_s=5.0, took=took)


@dataclass(eq=False)
class Observer:
    """Reads engine, HAProxy, probes and GPUs. It decides nothing."""

    engine: EngineWatch
    router: RouterWatch
    _prober: Prober
    _store: StateStore
    _gpu_memory: GpuMemoryWatch
    _gpu_marks: GpuMarks
    _clock: Callable[[], float]
    _wall: Callable[[], float] = time.time
    """Of the engine's times."""

    def __post_init__(self) -> None:
        self._times = ContainerTimes(self._clock, self._wall)
        self._losses = NodeLosses()
        self._asked_for: tuple[EngineReading, Spec, Mapping[str, Retirement]] | None = None
        """The input that the prober's list of replicas was last computed from."""
        self._marks: Mapping[str, Retirement] = {}
        self.stream_open = False
        self.latest = NOT_LOOKED_YET
        """The newest snapshot."""

    async def look(
        self, spec: Spec, in_progress: tuple[Action, ...], *, impatient: bool = False, thorough: bool = False
    ) -> WorldSnapshot:
        """Return a snapshot. `in_progress` must have been read before: an action that ends during it then counts as in
        progress, and nothing is planned for its target from a reading that may have missed its effect.

        `impatient`: the loop waits for something that sends no event (a GPU that others hold, an image). `thorough`:
        wait until the snapshot contains every change known now, and HAProxy's current state.
        """
        snapshot = await self._look(spec, in_progress, impatient=impatient, thorough=thorough)
        self.latest = self._gpu_memory.seen(snapshot.observed)
        return replace(snapshot, observed=self.latest)

    def look_ahead(self, snapshot: WorldSnapshot, plan: Plan, now: float) -> None:
        """Begin to read what a later look needs of the GPUs, and mark GPUs that cannot be used."""
        if snapshot.complete:
            self._gpu_memory.refresh(snapshot.spec, snapshot.observed, plan)
            self._gpu_marks.look(snapshot.observed, now)

    async def _look(
        self, spec: Spec, in_progress: tuple[Action, ...], *, impatient: bool, thorough: bool
    ) -> WorldSnapshot:
        retirements, failures = self._store.retirements.snapshot(), self._store.failures.snapshot()
        age_s = RELIABLE_S if self.stream_open and not impatient else UNRELIABLE_S
        with self.engine.looking(), self.router.looking():
            # Both are requested before either is awaited: a task for each would cost two turns of the event loop.
            of_router = self.router.ask(None, ROUTER_S, thorough=thorough)
            await self.engine.answer(self.engine.ask(spec, age_s, thorough=thorough))
            await self.router.answer(of_router)
        reading = self.engine.reading
        routing = None if self.router.error or self.router.reading is None else self.router.reading.value
        unseen = "" if self.engine.is_fresh(spec, age_s) else self.engine.error
        if reading is None:
            unseen = unseen or "the containers were not read yet"
            return WorldSnapshot(spec, Observed(routing=routing, in_progress=in_progress), unseen)
        # No await from here on but for the first round of probes: the parts are of one moment.
        in_progress = with_unseen(in_progress, itertools.chain(self.engine.unseen, self.router.unseen))
        retirements = self._kept_marks(in_progress, retirements)
        await self._take(reading, spec)
        state, faults = reading.value.state, self._store.gpu_faults.snapshot()
        judged = (with_fault(second_opinion(self._prober.judged(one), routing), faults) for one in state.containers)
        containers = self._times.brought_over(judged, reading.at)
        staying = [one for one in containers if one.id not in retirements]
        brake = self._losses.look(state.nodes, staying, self._clock())
        of_engine = {one.name: getattr(state, one.name) for one in fields(EngineState)}
        observed = Observed(
            **of_engine | {"containers": containers},
            routing=routing,
            router_problem=self.router.problem,
            router_silence=self.router.silence,
            retirements=retirements,
            failures=failures,
            gpu_faults={uuid: fault.reason for uuid, fault in faults.items()},
            unreached=self._losses.unreached(state.nodes, staying, routing, self._clock(), brake),
            brake=brake,
            in_progress=in_progress,
        )
        return WorldSnapshot(self._as_it_runs(spec, state), observed, unseen)

    def _as_it_runs(self, spec: Spec, state: EngineState) -> Spec:
        return adopting(restarted(spec, self._store.restarts), state.containers, state.images)

    def _kept_marks(self, in_progress: tuple[Action, ...], marks: Mapping[str, Retirement]) -> Mapping[str, Retirement]:
        """The retirements. The store forgets each with its container, which an earlier reading may still have."""
        removed = {action.container_id for action in in_progress if isinstance(action, RemoveContainer)}
        self._marks = {key: mark for key, mark in self._marks.items() if key in removed} | dict(marks)
        return self._marks

    async def _take(self, reading: EngineReading, spec: Spec) -> None:
        """Probe the replicas of this reading."""
        before = self._asked_for
        is_new = before is None or before[0] is not reading
        if is_new:
            there = {container.id for container in reading.value.state.containers}
            for container_id in reading.value.noted - there:  # removed from outside
                self._store.forget(container_id)
        retiring = self._store.retirements.snapshot()
        if before is None or is_new or before[1] is not spec or before[2] != retiring:
            state = reading.value.state
            outdated = outdated_containers(state.containers, self._as_it_runs(spec, state), state.images)
            self._prober.sync(state.containers, spec.services, retiring, outdated)
            self._asked_for = reading, spec, retiring
        if before is None:
            await self._prober.first_round(FIRST_ROUND_S)


def with_unseen(in_progress: tuple[Action, ...], unseen: Iterable[Action]) -> tuple[Action, ...]:
    """Return the actions in progress, and the ended ones whose effect may not have been seen, each once."""
    listed = {id(action) for action in in_progress}
    return (*in_progress, *(action for action in unseen if id(action) not in listed))


def second_opinion(container: ReplicaContainer, routing: RoutingState | None) -> ReplicaContainer:
    """Return a replica that fails our probe and passes HAProxy's as ready.

    HAProxy sends the same probe. If only the controller gets no answer, the fault is on the controller's side (a
    firewall, a lost network), and replacing every replica for it would cause an outage. HAProxy's result does not count
    where its check only connects (controller/desired/edge.py), because a replica that hangs accepts connections too,
    and not for a replica that reports that it is broken, because HAProxy's result may be older, or that it sleeps; nor
    for one without a network, which HAProxy reaches at its socket.
    """
    may_be_ours = container.health is ReplicaHealth.FAILED and container.ip is not None and not container.broken
    if not (may_be_ours and container.is_awake and routing is not None):
        return container
    server = routing.server_of(container.service, container.name)
    if server is not None and server.up and server.is_asked and server.state is ServerState.READY:
        detail = f"{container.health_detail}; HAProxy's own check passes"
        return replace(container, health=ReplicaHealth.READY, health_detail=detail)
    return container


def outdated_containers(
    containers: tuple[ReplicaContainer, ...], spec: Spec, images: Mapping[str, str | None]
) -> frozenset[str]:
    """Return ids of the containers whose version is not their service's current one."""
    versions = {name: current_version(service, images) for name, service in spec.services.items()}
    return frozenset(
        container.id
        for container in containers
        if (versions.get(container.service) or container.version) != container.version
    )
