"""Puts one snapshot of the world together from its parts: engine, HAProxy, probes, store, executor.

The engine's part is the dear one (a call for each container), so it is read again only when something says it changed:
an engine event, an action that ended, a timer. HAProxy's part is one line on a socket and is read every time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from controller.clock import ContainerTimes
from controller.engines.base import ClusterEngine, EngineState
from controller.errors import ControllerError, EngineError, StoreError
from controller.gpu_faults import struck
from controller.model import (
    Action,
    GpuFault,
    Health,
    Observed,
    ReplicaContainer,
    RoutingState,
    ServerState,
    Spec,
    current_version,
)
from controller.probe import Prober
from controller.routing.base import Router
from controller.store import Store

logger = logging.getLogger(__name__)

RELIABLE_S = 10.0
"""Oldest engine snapshot to plan from while its event stream is open: images and foreign containers send no events."""
UNRELIABLE_S = 1.0
"""The same while the stream is broken, or while something is waited for that no event tells."""
ENGINE_LIMIT_S = 50.0
ROUTER_LIMIT_S = 5.0
FIRST_ROUND_S = 3.0


@dataclass(frozen=True, slots=True)
class Sight:
    """A snapshot and how good it is. With an `engine_error` it is the last good one: for showing, not for planning."""

    observed: Observed
    engine_error: str = ""
    complete: bool = True
    """False while the engine was never read: containers are not known at all."""


class Observer:
    """Reads the world. The loop is its only caller."""

    def __init__(
        self,
        engine: ClusterEngine,
        router: Router,
        prober: Prober,
        store: Store,
        clock: Callable[[], float] = time.time,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`wall` is the clock that the engine's times are of."""
        self._engine = engine
        self._router = router
        self._prober = prober
        self._store = store
        self._clock = clock
        self._times = ContainerTimes(clock, wall)
        self._state: EngineState | None = None
        self._read_at = 0.0
        self._read_for: Spec | None = None
        self._changes = 1  # known changes of the engine's world, and how many of them the last reading has seen
        self._changes_read = 0
        self.stream_open = False

    def engine_changed(self) -> None:
        """Say that the engine's world is another now: the next look reads it again."""
        self._changes += 1

    async def look(self, spec: Spec, in_progress: tuple[Action, ...], *, impatient: bool = False) -> Sight:
        """Return the world now. `in_progress` must have been read before: an action that ends meanwhile then counts
        as going on, and nobody plans for its target from a reading that may have missed its effect.

        `impatient`: something is waited for that no event tells (a GPU that others hold, an image).
        """
        retirements, failures = self._store.retirements, self._store.failures
        routing, engine_error = await asyncio.gather(self._look_at_router(), self._look_at_engine(spec, impatient))
        state = self._state
        if state is None:
            return Sight(Observed(routing=routing, in_progress=in_progress), engine_error, complete=False)
        faults = self._store.gpu_faults
        judged = (with_fault(second_opinion(self._prober.judged(one), routing), faults) for one in state.containers)
        observed = Observed(
            containers=self._times.brought_over(judged),
            strays=state.strays,
            images=state.images,
            gpus=state.gpus,
            foreign_gpu_holders=state.foreign_gpu_holders,
            routing=routing,
            retirements=retirements,
            failures=failures,
            gpu_faults={uuid: fault.reason for uuid, fault in faults.items()},
            in_progress=in_progress,
        )
        return Sight(observed, engine_error)

    async def _look_at_router(self) -> RoutingState | None:
        try:
            async with asyncio.timeout(ROUTER_LIMIT_S):
                return await self._router.observe()
        except (ControllerError, TimeoutError) as error:
            logger.debug("HAProxy does not answer: %s", str(error) or f"nothing within {ROUTER_LIMIT_S:g} s")
            return None

    async def _look_at_engine(self, spec: Spec, impatient: bool) -> str:
        """Bring the engine's part up to date if need be; return the error in words, "" when there is none."""
        now = self._clock()
        limit_s = RELIABLE_S if self.stream_open and not impatient else UNRELIABLE_S
        fresh = self._changes == self._changes_read and self._read_for is spec and now - self._read_at < limit_s
        if not fresh:
            first = self._state is None
            known, changes = self._store.containers(), self._changes
            try:
                async with asyncio.timeout(ENGINE_LIMIT_S):
                    images = frozenset(service.image for service in spec.services.values())
                    state = await self._engine.observe(spec.project, frozenset(spec.services), images)
            except EngineError as error:
                return str(error)
            except TimeoutError:
                return f"the Docker Engine does not answer within {ENGINE_LIMIT_S:g} s"
            self._state, self._read_at, self._read_for, self._changes_read = state, now, spec, changes
            self._forget_gone(known, state)
        else:
            first = False
        self._sync_probes(spec)
        if first:
            await self._prober.first_round(FIRST_ROUND_S)
        return ""

    def _sync_probes(self, spec: Spec) -> None:
        if self._state is None:
            return
        outdated = outdated_containers(self._state.containers, spec, self._state.images)
        self._prober.sync(self._state.containers, spec.services, self._store.retirements, outdated)

    def _forget_gone(self, known: frozenset[str], state: EngineState) -> None:
        """Drop notes about containers somebody else removed. `known` was read before the engine was."""
        try:
            for container_id in known - {container.id for container in state.containers}:
                self._store.forget(container_id)
        except StoreError as error:
            logger.error("notes of removed containers were kept: %s", error)  # noqa: TRY400 - they harm nobody


def second_opinion(container: ReplicaContainer, routing: RoutingState | None) -> ReplicaContainer:
    """Return a replica that fails our probe and passes HAProxy's as ready.

    HAProxy asks the same question from elsewhere. When only we get no answer, the fault is ours (a firewall, a network
    that was taken away), and replacing every replica for it would be the outage.
    """
    if container.health is not Health.FAILED or routing is None:
        return container
    server = routing.server_of(container.service, container.name)
    if server is not None and server.up and server.state is ServerState.READY:
        detail = f"{container.health_detail}; HAProxy's own check passes"
        return replace(container, health=Health.READY, health_detail=detail)
    return container


def with_fault(container: ReplicaContainer, faults: Mapping[str, GpuFault]) -> ReplicaContainer:
    """Return the replica with what is wrong with its GPUs, if there is anything."""
    fault = struck(container, faults) if faults else ""
    return replace(container, gpu_fault=fault) if fault else container


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
