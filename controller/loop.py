"""The control loop: wake -> observe -> desire -> plan -> submit -> publish -> record.

Level-based: whatever wakes it (an engine event, a probe, an API call, an action that ended, a timer), it reads the
world again and never asks what the wake was about. A tick does not wait for actions: they run beside it, and the next
plan is told of those that have not ended.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from .apply import Executor, Give, Performer
from .desired.deployer import Deployer
from .desired.desired import switched_off, targets_of
from .desired.edge import edge_spec
from .desired.measurements import Measurements, Query, no_prometheus
from .desired.policies import Functions, Policies
from .desired.scaler import Scaler
from .engines.base import CONNECTED, OUT_OF_MEMORY, ClusterEngine, EngineAction
from .errors import (
    ControllerError,
    EngineError,
    EngineSocketGone,
    EngineUnreachable,
    InvalidRequest,
    NotYet,
    ReplicaError,
    SpecError,
    StoreError,
    UnknownService,
)
from .model.actions import Action, RemoveContainer, action_name
from .model.desired import Desired, goal_of
from .model.observed import Observed
from .model.plan import Outcome, Plan, describe
from .model.spec import ServiceSpec, Spec
from .model.world import GpuFault, ReplicaContainer, UserConfigReport
from .observe.gpu_faults import GpuWatch, Mark, Unmark
from .observe.gpu_memory import GpuMemoryWatch
from .observe.probe import Prober, Reading, Subject
from .observe.snapshot import Observer, Sight
from .outlive import outlive
from .plan import plan as make_plan
from .plan.failures import recovered
from .plan.user_config import remembered
from .routing.base import Router, RoutingAction
from .spec.watch import SpecSource, SpecWatch
from .status.discovery import Board
from .status.endpoints import endpoints, scrape_targets
from .status.metrics import ControllerMetrics, Measured, OwnTime
from .status.services import service_rows
from .status.transitions import transitions
from .status.view import View, gpu_uses, notices
from .storage.events import EventLog
from .storage.store import Override, Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0
"""Longest time between two looks at the world."""
BREATH_S = 0.01
"""Shortest time between two looks: what is due and cannot be done yet must not keep a core busy."""
LOOK_LIMIT_S = 60.0
"""How long somebody waits for a look that begins now; the engine's own limit is shorter."""
DEBOUNCE_S = 0.02
"""A burst of wakes within this time is one tick."""
REOPEN_S = 1.0
"""Pause before a broken event stream is opened again; meanwhile the engine is read each tick."""
ENGINE_LOST_S = 30.0
"""After so long without the engine the controller ends: traffic goes on, and Docker starts it again when it is back."""
SOCKET_GONE_S = 5.0
"""The same where the engine's socket file is deleted: the one that the next engine makes is out of reach of a container
that has the old one mounted. Not at once: while the engine is away anyway, there is somebody to say so."""
DEFECT_WORDS = "internal: a tick raised"
"""How the notice of a tick that did not come to its end begins."""


async def _nobody_is_there(address: str, text: str) -> UserConfigReport:
    raise ReplicaError(f"internal: nobody gives {len(text)} bytes of user_config to {address}")


Planner = Callable[[Desired, Observed, float], Plan]


class Wakeup:
    """Lets anybody wake the loop; many calls in a burst are one wake."""

    def __init__(self, debounce_s: float = DEBOUNCE_S) -> None:
        self._debounce_s = debounce_s
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake the loop soon."""
        self._rung.set()

    async def wait(self, limit_s: float) -> None:
        """Return shortly after the first ring since the last return, or after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._rung.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._debounce_s)
        self._rung.clear()


@dataclass(frozen=True, slots=True)
class World:
    """The loop's boundaries, made by `__main__` or by a test."""

    project: str
    engine: ClusterEngine
    router: Router
    source: SpecSource
    store: Store
    ask: Callable[[Subject], Awaitable[Reading]]
    is_manual: bool = False
    """New versions wait for `pierhead deploy`."""
    query: Query = no_prometheus
    policy_dir: Path | None = None
    """Where autoscaling functions are looked for."""
    give: Give = _nobody_is_there


def scale_words(spec: ServiceSpec, replicas: int | None) -> str:
    """Who decides how many replicas a service has after a scale call; "" where that is simply who called."""
    if spec.autoscale is None:
        count = "1 replica" if spec.replicas == 1 else f"{spec.replicas} replicas"
        return f"the compose files decide, {count}" if replicas is None else ""
    bounds = f"{spec.autoscale.min} to {spec.autoscale.max}"
    if replicas is None:
        return f"the autoscaler decides, {bounds}"
    return f"the autoscaler ({bounds}) pauses until `make scale SERVICE={spec.name} N=auto`"


class Loop:
    """Owns what the controller believes and does. `spawn` owns the tasks it starts.

    `clock` never jumps (controller/storage/clock.py); `wall` may, and is what people and the engine go by.
    """

    def __init__(
        self,
        world: World,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        *,
        clock: Callable[[], float] = time.time,
        wall: Callable[[], float] = time.time,
        planner: Planner = make_plan,
        engine_lost_s: float = ENGINE_LOST_S,
    ) -> None:
        self._world = world
        self._spawn = spawn
        self._clock = clock
        self._wall = wall
        self._planner = planner
        self._engine_lost_s = engine_lost_s
        self._wakeup = Wakeup()
        self.events = EventLog(world.store, wall)
        self.metrics = ControllerMetrics(lambda: self.view)
        self.board = Board(clock=clock)
        self.view = View(at=clock(), project=world.project, ahead_s=self._ahead_s())
        self.started_at = clock()
        self.last_tick_at: float | None = None
        self._waiting_for_look: list[asyncio.Future[str]] = []
        """Told, when a look has ended, why nothing was seen; "" = all of the world was."""
        self._told_of_this_look: list[asyncio.Future[str]] = []
        self._unseen = ""
        self.specs = SpecWatch(world.source, self.events, self._spec_changed)
        self._prober = Prober(world.ask, spawn, self._wakeup.ring, world.store.seen_ready, self._note_ready, clock)
        self._observer = Observer(
            world.engine,
            world.router,
            self._prober,
            world.store,
            self._wakeup.ring,
            self.metrics.engine_reading,
            clock,
            wall,
            self.metrics.haproxy_reading,
        )
        performer = Performer(
            world.engine,
            world.router,
            world.store,
            self.events,
            world.project,
            self._service_specs,
            lambda: self._edge,
            world.give,
            self._prober.learn,
            clock,
        )
        self._executor = Executor(performer.perform, self._ended, spawn, clock)
        self._measurements = Measurements(world.query, spawn, clock)
        policies = Policies(Functions(world.policy_dir, ahead=self._ahead_s), self._measurements.value)
        self._scaler = Scaler(world.store, self.events, policies.ask)
        self.deployer = Deployer(world.store, self.events, self.board.callers, is_manual=world.is_manual)
        self._gpu_memory = GpuMemoryWatch(world.engine, spawn, self._wakeup.ring, clock)
        self._gpus = GpuWatch()
        self._failed: Mapping[str, ReplicaContainer] = {}
        """Those that are being removed, by container id."""
        self.store_trouble = ""
        """Why the state file cannot be written; "" when it can."""
        self._defect = ""
        self._edge: Mapping[str, ServiceSpec] = {}
        self._user_configs: Mapping[str, str] = {}
        if world.store.set_aside is not None:
            lost = (
                f"the state file was damaged and is kept at {world.store.set_aside}; scale targets are the files' again"
            )
            self.events.record("store_replaced", lost, outcome="warning")

    @property
    def now(self) -> float:
        """The time by the clock that everything here goes by."""
        return self._clock()

    @property
    def wall_now(self) -> float:
        """The time by the wall clock: what people and the engine go by."""
        return self._wall()

    @property
    def in_progress(self) -> tuple[Action, ...]:
        """Actions that have begun, or wait for others, and have not ended."""
        return self._executor.in_progress

    # --------------------------------------------------------------------------------------------------------- run

    def start(self) -> None:
        """Begin: read the compose files, follow the engine, look and act. All of it ends with the owner of `spawn`."""
        self._spawn(outlive("watching the compose files", self.specs.run))
        self._spawn(outlive("following the engine", self._follow_engine, ends_with=(EngineUnreachable,)))
        self._spawn(outlive("reading the engine", self._observer.run))
        self._spawn(outlive("reading HAProxy", self._observer.run_router))
        self._spawn(outlive("the loop", self._run))

    async def _run(self) -> None:
        while True:
            look_s = await self._guarded_tick()
            await self._wakeup.wait(look_s)

    async def _guarded_tick(self) -> float:
        started, spent = self._clock(), OwnTime()
        waiting = self._told_of_this_look = self._waiting_for_look
        self._waiting_for_look = []
        try:
            look_s = await Measured(self.tick(), spent)
        except Exception as error:
            # A defect that one state of the world brings out must not take the API and the probes down with it.
            message = f"{DEFECT_WORDS} {type(error).__name__}: {error}; nothing is done until this is over"
            if message != self._defect:  # its traceback once, not every second
                logger.exception("internal: a tick raised")
            self._defect = message
            self._show_defect(message)
            self.events.record("tick_failed", message, outcome="failed")
            self.metrics.tick_failed()
            look_s = LOOK_S
        else:
            self._defect = ""
            self.last_tick_at = self._clock()
        self._told_of_this_look = []
        for looked in waiting:
            if not looked.done():
                looked.set_result(self._defect or self._unseen)
        self.metrics.tick(self._clock() - started, spent)
        return look_s

    @property
    def defect(self) -> str:
        """Why the last tick did not come to its end, in words; "" when it did."""
        return self._defect

    def _show_defect(self, message: str) -> None:
        """What was published last goes on to be shown, with the news that it is old."""
        others = tuple(notice for notice in self.view.notices if not notice.startswith(DEFECT_WORDS))
        self.view = replace(self.view, notices=(message, *others))

    async def tick(self) -> float:
        """Do one round; return after how many seconds the next is due at the latest."""
        self._watch_store()
        spec, files = self.specs.current, self.specs.files
        if spec is None:
            self._unseen = "the compose files are not read yet"
            self.view = View(
                self._clock(),
                self._world.project,
                spec_problems=self.specs.problems,
                files=files,
                ahead_s=self._ahead_s(),
            )
            return LOOK_S
        in_progress = self._executor.in_progress
        sight = await self._observer.look(
            spec, in_progress, impatient=bool(self.view.plan.pending), thorough=bool(self._told_of_this_look)
        )
        sight = replace(sight, observed=self._gpu_memory.seen(sight.observed))
        now = self._clock()
        overrides = {service: override.replicas for service, override in self._world.store.overrides.items()}
        self._measurements.sync(spec.services)
        seen, self._unseen = sight.complete, sight.unseen
        autoscaled = self._scaler.targets(spec.services, sight.observed, now) if seen else self._scaler.kept()
        targets = targets_of(spec, overrides, autoscaled)
        desired = self._desired(spec, sight, targets, switched_off(spec.services, targets, overrides), now, seen=seen)
        # Nothing can be concluded from containers that could not be read.
        plan = self._planner(desired, sight.observed, now) if sight.complete else Plan()
        self._executor.submit(plan)
        self._note_removals(sight.observed)
        if seen:
            self._gpu_memory.refresh(desired, sight.observed, plan)
            self._watch_gpus(sight.observed, now)
        self._publish(desired, sight, plan, overrides, files, now)
        self._forgive(desired, sight.observed, now)
        dues = (
            LOOK_S,
            plan.next_look_s,
            self._executor.gate.next_opening_s(now),
            self._scaler.due_in_s(spec.services, now) if seen else None,  # nothing is decided before it is seen
        )
        return max(BREATH_S, min(due for due in dues if due is not None))

    def _desired(
        self, spec: Spec, sight: Sight, targets: Mapping[str, int], off: frozenset[str], now: float, *, seen: bool
    ) -> Desired:
        """Put together what there shall be. From a world that cannot be seen no rollout concludes anything."""
        directions = self.deployer.directions
        if seen:
            refusals, pending = self._executor.gate.refusals(), self.view.plan.pending
            directions = self.deployer.look(spec, sight.observed, targets, refusals, now, pending)
        services = {name: directions.services.get(name, service) for name, service in spec.services.items()}
        self._edge = {
            name: edge_spec(service, sight.observed, directions.made.get(name, {}))
            for name, service in services.items()
        }
        return Desired(
            project=spec.project,
            services=self._edge,
            targets=targets,
            goals={name: goal for name, goal in directions.goals.items() if name in services},
            switched_off=off,
            routing_hash=self._world.router.routing_hash(self._edge.values()),
        )

    def _publish(
        self,
        desired: Desired,
        sight: Sight,
        plan: Plan,
        overrides: Mapping[str, int],
        files: Hashable,
        now: float,
    ) -> None:
        refusals = self._executor.gate.refusals()
        specs = (*desired.services.values(), *(goal.keep_spec for goal in desired.goals.values()))
        self._user_configs = remembered(self._user_configs, specs)
        before, self.view = (
            self.view,
            View(
                at=now,
                project=self._world.project,
                desired=desired,
                observed=sight.observed,
                plan=plan,
                services=service_rows(
                    desired,
                    sight.observed,
                    plan,
                    refusals,
                    overrides,
                    now,
                    self._scaler.rows,
                    self.deployer.directions.rows,
                    self._user_configs,
                ),
                gpus=gpu_uses(sight.observed),
                gpu_memory_problem=self._gpu_memory.problem,
                endpoints=endpoints(desired, sight.observed, overrides),
                targets=scrape_targets(desired, sight.observed),
                spec_problems=self.specs.problems,
                files=files,
                notices=(*self._store_notices(), *notices(sight.observed, refusals, sight.unseen, now)),
                refusals=refusals,
                engine_reachable=sight.complete,
                haproxy_reachable=sight.observed.routing is not None,
                ahead_s=self._ahead_s(),
            ),
        )
        if sight.complete or self.board.is_published:
            self.board.publish(self.view.endpoints)
        for change in transitions(before, self.view):
            self.events.record(
                change.kind, change.message, service=change.service, target=change.target, outcome=change.outcome
            )

    def _ahead_s(self) -> float:
        """By how much the wall clock is ahead of the controller's."""
        return self._wall() - self._clock()

    def _watch_store(self) -> None:
        """Try again to write what could not be written, and tell when that begins and ends."""
        store, before = self._world.store, self.store_trouble
        if store.trouble:
            store.settle()
        self.store_trouble = store.trouble
        if self.store_trouble and not before:
            self.events.record("store_failing", self._store_notices()[0], target="store", outcome="warning")
        elif before and not self.store_trouble:
            self.events.record("store_works", "the state file is written again", target="store", outcome="ok")

    def _store_notices(self) -> tuple[str, ...]:
        if not self.store_trouble:
            return ()
        return (f"nothing can be kept, a controller that starts now would not know what happens: {self.store_trouble}",)

    def _watch_gpus(self, observed: Observed, now: float) -> None:
        """Mark GPUs that are gone or on which replicas fail, and take marks back."""
        for change in self._gpus.look(observed, self._world.store.gpu_faults, now, self.deployer.proven()):
            try:
                self._change_gpu(change)
            except StoreError as error:
                logger.error("a mark on a GPU was not kept: %s", error)  # noqa: TRY400 - the next tick tries again

    def _change_gpu(self, change: Mark | Unmark) -> None:
        match change:
            case Mark(fault):
                self._world.store.mark_gpu(fault)
                words = f"no replica is placed on GPU {fault.uuid}: {fault.reason}"
                self.events.record("gpu_marked", words, target=fault.uuid, outcome="warning")
            case Unmark(uuid, why, asked):
                self._world.store.unmark_gpu(uuid, asked=asked)
                self.events.record("gpu_unmarked", f"GPU {uuid} is used again: {why}", target=uuid, outcome="ok")
        self._wakeup.ring()

    def _forgive(self, desired: Desired, observed: Observed, now: float) -> None:
        """Clear failure records of versions that work again, or that nobody wants any more."""
        wanted = {
            (name, version)
            for name in desired.services
            for goal in [goal_of(desired, observed, name)]
            for version in (goal.version, goal.keep)
        }
        present = {(container.service, container.version) for container in observed.containers}
        forgotten = {key for key in observed.failures if key not in wanted | present}
        for key in recovered(desired, observed, self._prober.ready_since, now) | forgotten:
            self._world.store.clear_failure(key)

    # ------------------------------------------------------------------------------------------------------- commands

    def scale(self, service: str, replicas: int | None) -> str:
        """Set a service's target, or with None let files or autoscaler decide again; wake the loop.

        Returns who decides now, in words, unless it is simply who called. Raises UnknownService, SpecError, StoreError.
        """
        spec = self.known(service).services[service]
        before = self._world.store.overrides.get(service)
        was = self.view.desired.targets.get(service, spec.replicas) if self.view.desired else spec.replicas
        if replicas is None or (replicas == spec.replicas and spec.autoscale is None):
            if before is not None:
                self._world.store.drop_override(service)
        elif before is None or before.replicas != replicas:
            self._world.store.set_override(service, Override(replicas, spec.replicas))
        words = scale_words(spec, replicas)
        asked = spec.replicas if replicas is None and spec.autoscale is None else replicas
        if asked is not None and asked != was:
            said = f"{service}: {was} -> {asked} replicas" + (f"; {words}" if words else "")
            self.events.record("scale", said, service=service, outcome="ok")
        elif words and replicas != (before.replicas if before else None):
            self.events.record("scale", f"{service}: {words}", service=service, outcome="ok")
        self._wakeup.ring()
        return words

    async def deploy(self, services: Sequence[str] | None) -> Mapping[str, str]:
        """Take what files and images give now, for all services or these; return one sentence each.

        Both are read again first: whoever edits a file and deploys means what it says now. Raises UnknownService,
        SpecError, StoreError, ControllerError (no look at the world ends), EngineUnreachable (it saw nothing).
        """
        await self.specs.read_again()
        if self.specs.problems:
            raise SpecError(self.specs.problems)
        await self._next_look()
        names = sorted(self.known_spec().services) if services is None else services
        for name in names:
            self.known(name)
        return self._asked(self.deployer.deploy(names, self._clock()))

    def roll_back(self, service: str, to: str | None) -> str:
        """Go back to an earlier version. Raises UnknownService, InvalidRequest, SpecError, StoreError."""
        self.known(service)
        return self._asked(self.deployer.roll_back(service, to, self._clock()))

    async def refuse_lost_version(self, service: str, to: str | None) -> None:
        """See that the version which `roll_back` would bring back still has its image.

        Raises what `roll_back` raises, InvalidRequest for an image that is gone, EngineError where nobody can say.
        """
        self.known(service)
        version = self.deployer.way_back(service, to)
        here: dict[str, bool] = {}
        for revision in self.deployer.revisions(service) if version is not None else ():
            here[revision.version] = await self._world.engine.has_image(revision.image_id)
        if version is None or here.get(version, True):
            return
        others = [other for other, is_here in here.items() if is_here and other != self.deployer.state(service).stable]
        raise InvalidRequest(
            f"{service}: the image that version {version} was made of is not on this machine any more (`docker image "
            f"prune` removes such images), so it cannot come back, and nothing was changed; versions that can: "
            f"{', '.join(others) or 'none'}. Or build the code of then, and `pierhead deploy {service}`"
        )

    def abort(self, service: str) -> str:
        """End a rollout. Raises UnknownService, InvalidRequest, SpecError, StoreError."""
        self.known(service)
        return self._asked(self.deployer.abort(service, self._clock()))

    def promote(self, service: str) -> str:
        """End the watch over a new version's first replicas. Raises as `abort` does."""
        self.known(service)
        return self._asked(self.deployer.promote(service, self._clock()))

    async def _next_look(self) -> None:
        """Return when the loop has looked at all of the world once more and has seen it.

        Raises EngineUnreachable when it has not seen it, ControllerError when it does not look.
        """
        looked = asyncio.get_running_loop().create_future()
        self._waiting_for_look.append(looked)
        self._observer.engine_changed()
        self._wakeup.ring()
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                unseen = await looked
        except TimeoutError:
            raise ControllerError(
                f"the controller has not looked at the world for {LOOK_LIMIT_S:g} s; `pierhead status` says what it "
                "waits for"
            ) from None
        if unseen:
            raise EngineUnreachable(
                f"what files and images give now could not be seen, so nothing was changed: {unseen}; repeat it when "
                "`pierhead status` shows the world again"
            )

    def _asked(self, said: T) -> T:
        self._wakeup.ring()
        return said

    def mark_gpu(self, uuid: str, reason: str) -> None:
        """Place no replica on a GPU any more; those that are there stay. Raises InvalidRequest, StoreError."""
        self._known_gpu(uuid)
        self._change_gpu(Mark(GpuFault(uuid, reason, self._clock(), "marked")))

    def unmark_gpu(self, uuid: str) -> None:
        """Use a GPU again. Raises InvalidRequest (it has no mark), StoreError."""
        faults = self._world.store.gpu_faults
        if uuid not in faults:
            raise InvalidRequest(f"GPU {uuid} has no mark; with one: {', '.join(sorted(faults)) or 'none'}")
        self._change_gpu(Unmark(uuid, "somebody said so", asked=True))
        self._gpus.forget(uuid)

    def _known_gpu(self, uuid: str) -> None:
        known = [gpu.uuid for gpu in self.view.gpus]
        if uuid not in known:
            raise InvalidRequest(f"there is no GPU {uuid!r}; this machine has {', '.join(known) or 'none'}")

    async def logs(
        self, service: str, tail: int, after: float | None = None, *, timed: bool = False
    ) -> Mapping[str, str]:
        """Return the last `tail` lines of every replica, those from a unix time on, by name; `timed`: as the engine's.

        Raises UnknownService, EngineError.
        """
        mine = self.view.observed.containers_of(service) if self.view.observed else ()
        if not mine:
            self.known(service)
        engine = self._world.engine
        texts = await asyncio.gather(*(engine.logs(container.id, tail, after, timed=timed) for container in mine))
        return {container.name: text for container, text in zip(mine, texts, strict=True)}

    def known_spec(self) -> Spec:
        """Return what the compose files say. Raises SpecError, NotYet (they were not read yet)."""
        spec = self.specs.current
        if spec is None:
            if self.specs.problems:
                raise SpecError(self.specs.problems)
            raise NotYet("the controller has just been started and reads the compose files; repeat in a second")
        return spec

    def known(self, service: str) -> Spec:
        """Return the spec if it has that service. Raises UnknownService, SpecError (none is usable), NotYet."""
        spec = self.known_spec()
        if service not in spec.services:
            names = sorted(spec.services)
            near = difflib.get_close_matches(service, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownService(
                f"there is no service {service!r} with an x-serve block; {hint}Services: {', '.join(names) or 'none'}"
            )
        return spec

    # ----------------------------------------------------------------------------------------------------- what wakes

    def _spec_changed(self) -> None:
        spec = self.specs.current
        if spec is not None and not self.specs.problems:  # of files that cannot be read nobody knows what they say
            for name, override in dict(self._world.store.overrides).items():
                service = spec.services.get(name)
                if service is None:
                    self._drop_override(name, override, f"the compose files no longer have {name}")
                elif service.replicas != override.spec_replicas:
                    self._drop_override(name, override, f"the compose files now say {service.replicas} replicas")
        self._wakeup.ring()

    def _drop_override(self, service: str, override: Override, why: str) -> None:
        """The compose files were edited after the scale call: the last word counts."""
        try:
            self._world.store.drop_override(service)
        except StoreError as error:
            logger.error("a scale target was kept: %s", error)  # noqa: TRY400 - the next change tries again
            return
        message = f"{service}: {why}; the {override.replicas} set by scale end"
        self.events.record("scale", message, service=service)

    def _ended(self, outcome: Outcome) -> None:
        action = outcome.action
        self.metrics.action(outcome)
        if isinstance(action, EngineAction):
            self._observer.action_ended(action)
        elif isinstance(action, RoutingAction):
            self._observer.routing_action_ended(action)
        if isinstance(action, RemoveContainer) and outcome.error is None:
            failed = self._failed.get(action.container_id)
            if failed is not None:
                self._gpus.failed(failed)
        words = f"{describe(action)}: {action.cause}"
        self.events.record(
            action_name(action),
            f"{words}; failed: {outcome.message}" if outcome.error else words,
            service=action.service,
            target=action.target,
            outcome="failed" if outcome.error else "ok",
        )
        if not isinstance(action, EngineAction):  # the engine is read first, which wakes the loop
            self._wakeup.ring()

    def _note_removals(self, observed: Observed) -> None:
        """Remember replicas that failed for as long as they are being removed: the world may forget them before."""
        there = {**self._failed, **{container.id: container for container in observed.containers}}
        removed = [one for one in self._executor.in_progress if isinstance(one, RemoveContainer) and one.failed]
        self._failed = {one.container_id: there[one.container_id] for one in removed if one.container_id in there}

    async def _follow_engine(self) -> None:
        """At every event have the engine read, which wakes the loop. Raises EngineUnreachable when it stays away."""
        heard_at = self._clock()
        while True:
            try:
                async for event in self._world.engine.events(self._world.project):
                    heard_at = self._clock()
                    self._observer.stream_open = self._observer.stream_open or event == CONNECTED
                    if event.kind == OUT_OF_MEMORY:
                        self._note_out_of_memory(event.container_id)
                    self._observer.engine_changed()
            except EngineError as error:
                logger.warning("the engine's event stream broke, opening it again: %s", error)
                heard_at = heard_at if not self._observer.stream_open else self._clock()
                gone = isinstance(error, EngineSocketGone)
                patience_s = min(SOCKET_GONE_S, self._engine_lost_s) if gone else self._engine_lost_s
                if self._clock() - heard_at > patience_s:
                    why = "its socket file is deleted" if gone else str(error)
                    raise EngineUnreachable(
                        f"the Docker Engine has not answered for {patience_s:g} s ({why}); "
                        "the controller ends and Docker, when it is back, starts it again"
                    ) from error
            finally:
                self._observer.stream_open = False
            self._wakeup.ring()
            await asyncio.sleep(REOPEN_S)

    def _note_out_of_memory(self, container_id: str) -> None:
        """The kernel has killed a process in a replica: the first one, which ends it, or another, which may not."""
        containers = self.view.observed.containers if self.view.observed else ()
        for one in containers:
            if one.id == container_id:
                words = "out of memory: the kernel killed a process in it (raise deploy.resources.limits.memory)"
                self.events.record(
                    "out_of_memory", f"{one.name}: {words}", service=one.service, target=one.name, outcome="warning"
                )

    def _note_ready(self, container_id: str, started_at: float) -> None:
        try:
            self._world.store.note_ready(container_id, started_at)
        except StoreError as error:
            logger.error("that a replica was ready was not kept: %s", error)  # noqa: TRY400 - only a restart asks

    def _service_specs(self) -> Mapping[str, Any]:
        return self.specs.current.services if self.specs.current else MappingProxyType({})
