"""What the planner must never do, on worlds that hypothesis makes up.

A small simulated world carries plans out (each action may fail or take its time), replicas become ready, hang, crash
and are busy at random, targets, versions and HAProxy change. After every step the safety properties hold; when the
trouble ends the world converges and the plan is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.model.actions import (
    Action,
    AddServer,
    BeginRetirement,
    CreateContainer,
    DeleteServer,
    RemoveContainer,
    SetServerState,
    SetServerWeight,
    ShutdownSessions,
    SignalContainer,
    StartContainer,
    WriteRouting,
)
from controller.model.desired import VersionGoal
from controller.model.machine import Footprint, Machine
from controller.model.observed import Observed
from controller.model.phases import Phase, phase_of
from controller.model.plan import Plan
from controller.model.spec import RolloutSpec, ServiceSpec
from controller.model.world import (
    ContainerState,
    FailureKey,
    FailureRecord,
    Gpu,
    ReplicaContainer,
    ReplicaHealth,
    Retirement,
    RoutingState,
    Server,
    ServerState,
)
from controller.plan import plan
from controller.plan.leave import BLIND_DRAIN_S, PROPAGATION_S
from controller.plan.machine import LEAST_STARTS, MOST_LOAD_PER_CORE
from tests.unit.controller.worlds import desired, gpu_service, gpus, service, version

TICK_S = 0.5
READY_AFTER_S = 1.5
GPUS = 4
OPS = (
    *("tick", "tick", "tick", "ready", "hang", "crash", "busy", "idle", "scale", "version", "haproxy", "restart"),
    *("pace", "trial", "trial over"),
)
REPLICA_BYTES, KEPT_BYTES = 100 * 1024**2, 1024**2
"""What a replica takes of the machine's memory, and what the machine keeps."""
PACES = (RolloutSpec(1, 0), RolloutSpec(2, 0), RolloutSpec(0, 1), RolloutSpec(1, 1), RolloutSpec(2, 2))
"""max_surge, max_unavailable."""


@dataclass
class World:
    """Containers, servers and marks that plans change and chance disturbs."""

    specs: dict[str, ServiceSpec]
    targets: dict[str, int]
    now: float = 1_000.0
    containers: dict[str, ReplicaContainer] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)
    retirements: dict[str, Retirement] = field(default_factory=dict)
    failures: dict[FailureKey, FailureRecord] = field(default_factory=dict)
    kept: dict[str, ServiceSpec] = field(default_factory=dict)
    """By service: the version that keeps serving while the spec's is tried."""
    routing_hash: str = "old"
    haproxy_up: bool = True
    created: int = 0
    gpus: tuple[Gpu, ...] = gpus(GPUS)
    memory: int | None = None
    """How many replicas it is enough for; None = what the machine has is not known."""
    load: float = 0.0

    def snapshot(self, in_progress: tuple[Action, ...] = ()) -> Observed:
        routing = RoutingState(
            pid=1,
            started_at=0.0,
            version="3.0",
            routing_hash=self.routing_hash,
            servers=tuple(self.servers.values()),
            backends=frozenset({"svc_web"}) if self.routing_hash == "routes1" else frozenset(),
        )
        return Observed(
            containers=tuple(self.containers.values()),
            images={spec.image: "sha256:1" for spec in self.specs.values()},
            gpus=self.gpus,
            routing=routing if self.haproxy_up else None,
            retirements=self.retirements,
            failures=self.failures,
            in_progress=in_progress,
            machine=self.machine(),
        )

    def machine(self) -> Machine | None:
        if self.memory is None:
            return None
        running = sum(container.state.is_up for container in self.containers.values())
        free, takes = (self.memory - running) * REPLICA_BYTES, Footprint(memory_bytes=REPLICA_BYTES)
        known = {"web": takes, "ranker": takes}
        return Machine(1, 20 * KEPT_BYTES, free + KEPT_BYTES, 1000, 0, self.load, footprints=known)

    def plan(self, in_progress: tuple[Action, ...] = ()) -> Plan:
        goals = {
            name: VersionGoal(version(self.specs[name]), keep=version(kept), keep_spec=kept, weight=20)
            for name, kept in self.kept.items()
            if version(kept) != version(self.specs[name])
        }
        wanted = replace(desired(*self.specs.values(), **self.targets), goals=goals)
        return plan(wanted, self.snapshot(in_progress), self.now)

    def phase(self, container: ReplicaContainer) -> Phase:
        return phase_of(container, self.specs[container.service], self.retirements.get(container.id), self.now)[0]

    def least_ready(self, name: str) -> int:
        """How many replicas must stay ready: one less where no GPU is free for one more, of several."""
        spec, target = self.specs[name], self.targets[name]
        if spec.gpu is None:
            return target - spec.rollout.max_unavailable
        return min(target, len(self.gpus)) - max(spec.rollout.max_unavailable, int(target > 1))

    def check_owners(self, actions: list[Action], removing: set[str]) -> None:
        owners = [uuid for name, c in self.containers.items() if name not in removing for uuid in c.gpus]
        owners += [gpu.uuid for action in actions if isinstance(action, CreateContainer) for gpu in action.gpus]
        assert len(owners) == len(set(owners)), "no GPU has two owners"

    def reached(self) -> int:
        """How many servers get traffic."""
        return sum(server.up and server.state is ServerState.READY for server in self.servers.values())

    def perform(self, action: Action) -> None:  # noqa: C901 - one branch an action
        match action:
            case CreateContainer():
                assert action.target not in self.containers
                self.created += 1
                self.containers[action.target] = ReplicaContainer(
                    id=f"id{self.created}",
                    name=action.target,
                    service=action.service,
                    version=action.version,
                    number=action.number,
                    state=ContainerState.CREATED,
                    ip=f"10.0.{self.created // 250}.{self.created % 250}",
                    gpus=tuple(gpu.uuid for gpu in action.gpus),
                    created_at=self.now,
                )
            case StartContainer():
                self.change(action.target, state=ContainerState.RUNNING, started_at=self.now)
            case BeginRetirement():
                self.retirements[action.container_id] = Retirement(
                    action.target, action.container_id, self.now, None, action.cause, action.failed
                )
            case SignalContainer(signal="SIGTERM"):
                mark = self.retirements[action.container_id]
                self.retirements[action.container_id] = replace(mark, stopping_since=self.now)
                if self.containers[action.target].health is ReplicaHealth.READY:
                    self.change(action.target, state=ContainerState.EXITED, exit_code=0)
            case SignalContainer():
                self.change(action.target, state=ContainerState.EXITED, exit_code=137)
            case RemoveContainer():
                assert not self.containers[action.target].state.is_up
                assert action.target not in self.servers or not self.haproxy_up
                del self.containers[action.target]
                self.retirements.pop(action.container_id, None)
                if action.failed:
                    key = (action.service, action.version)
                    before = self.failures.get(key)
                    self.failures[key] = FailureRecord(before.count + 1 if before else 1, self.now, "x")
            case AddServer():
                self.servers[action.target] = Server(
                    action.backend, action.target, action.address, ServerState.READY, up=True, weight=action.weight
                )
            case SetServerWeight():
                assert 1 <= action.weight <= 256
                self.change_server(action.target, weight=action.weight)
            case SetServerState():
                self.change_server(action.target, state=action.state)
            case ShutdownSessions():
                self.change_server(action.target, sessions=0)
            case DeleteServer():
                assert self.servers[action.target].state is ServerState.MAINT
                del self.servers[action.target]
            case WriteRouting():
                self.routing_hash = action.routing_hash
            case _:
                raise AssertionError(action)

    def change(self, name: str, **changes: object) -> None:
        self.containers[name] = replace(self.containers[name], **changes)  # type: ignore[arg-type]

    def change_server(self, name: str, **changes: object) -> None:
        self.servers[name] = replace(self.servers[name], **changes)  # type: ignore[arg-type]

    def apply(self, result: Plan, fails: set[int]) -> None:
        """Carry the plan out in order; a failed step takes its dependents with it."""
        for step in result.steps:
            if step.number in fails or fails & set(step.after):
                fails.add(step.number)
                continue
            self.perform(step.action)

    def let_time_pass(self) -> None:
        self.now += TICK_S
        for name, container in list(self.containers.items()):
            if container.state.is_up and container.health is ReplicaHealth.READY:
                self.change(name, ongoing_at=self.now)
            age = self.now - (container.started_at or self.now)
            if container.state.is_up and container.health is ReplicaHealth.UNKNOWN and age >= READY_AFTER_S:
                self.change(name, health=ReplicaHealth.READY, ongoing=0, ongoing_at=self.now)

    def disturb(self, op: str, pick: int) -> None:  # noqa: C901 - one branch an operation
        names, services = sorted(self.containers), sorted(self.specs)
        name, service_name = names[pick % len(names)] if names else "", services[pick % len(services)]
        spec = self.specs[service_name]
        up = bool(names) and self.containers[name].state.is_up
        ready = up and self.containers[name].health is ReplicaHealth.READY
        match op:
            case "ready" if up and self.containers[name].health is ReplicaHealth.UNKNOWN:
                self.change(name, health=ReplicaHealth.READY, ongoing=0, ongoing_at=self.now)
            case "hang" if ready:
                self.change(name, health=ReplicaHealth.FAILED, ongoing=None)
            case "crash" if up:
                self.change(name, state=ContainerState.EXITED, exit_code=1, health=ReplicaHealth.UNKNOWN)
            case "busy" | "idle" if ready:
                requests = 5 if op == "busy" else 0
                self.change(name, ongoing=requests)
                if name in self.servers:
                    self.change_server(name, sessions=requests)
            case "scale":
                self.targets[service_name] = pick % 6
            case "version":
                self.specs[service_name] = replace(spec, definition_hash=f"d{pick % 3}")
            case "pace":
                self.specs[service_name] = replace(spec, rollout=PACES[pick % len(PACES)])
            case "trial":
                self.kept[service_name] = replace(spec, definition_hash=f"d{pick % 3}")
            case "trial over":
                self.kept.clear()
            case "haproxy":
                self.haproxy_up = not self.haproxy_up
            case "restart":
                self.servers.clear()
            case _:
                pass


def check_safety(world: World, result: Plan) -> None:
    """Every property that a plan must have, given the world it was made for."""
    by_name = world.containers
    actions = [step.action for step in result.steps]
    phases = {name: world.phase(container) for name, container in by_name.items()}
    retiring = {action.target for action in actions if isinstance(action, BeginRetirement)}
    removing = {action.target for action in actions if isinstance(action, RemoveContainer)}

    for action in actions:
        if isinstance(action, AddServer):
            assert phases[action.target] is Phase.RUNNING, "a server only for a ready replica that stays"
            assert action.target not in retiring
        if isinstance(action, SignalContainer) and action.signal == "SIGTERM":
            check_drained(world, action)
        assert action.cause, "every action says why"

    for name, target in world.targets.items():
        alive = [n for n, c in by_name.items() if c.service == name and phases[n].serves_or_will]
        staying = [n for n in alive if n not in retiring | removing]
        creates = [a for a in actions if isinstance(a, CreateContainer) and a.service == name]
        most = target + max(1, world.specs[name].rollout.max_surge)
        assert len(staying) + len(creates) <= max(most, len(staying)), "never above target plus surge"
        ready = [n for n in alive if phases[n] is Phase.RUNNING]
        ready_staying = [n for n in ready if n not in retiring]
        assert len(ready_staying) >= min(world.least_ready(name), len(ready)), "readiness is never given away"
        if world.specs[name].rollout.max_unavailable < target and ready:
            assert ready_staying, "the last ready replica stays while any is wanted"

    world.check_owners(actions, removing)

    numbers = [step.number for step in result.steps]
    assert all(set(step.after) <= set(numbers[: step.number - 1]) for step in result.steps), (
        "steps wait for earlier ones"
    )


def check_drained(world: World, action: SignalContainer) -> None:
    container = world.containers[action.target]
    spec = world.specs[container.service]
    mark = world.retirements[container.id]
    waited = world.now - mark.draining_since
    server = world.servers.get(action.target) if world.haproxy_up else None
    if waited >= spec.graceful_shutdown_timeout_s:
        return
    if mark.stopping_since is not None:  # it was drained when it got its first SIGTERM
        assert spec.managed, "a foreign process ends at a second SIGTERM, whatever it does"
        return
    if container.health is not ReplicaHealth.READY:
        is_slow = container.health is ReplicaHealth.FAILED and not mark.failed
        assert not (is_slow and server and server.sessions), "a replica that is slow while it drains may finish"
        return
    assert container.ongoing == 0
    assert waited >= (spec.graceful_shutdown_wait_loop_s or min(PROPAGATION_S, BLIND_DRAIN_S))
    if server:
        assert server.state is not ServerState.READY
        assert server.sessions == 0


def new_world() -> World:
    specs = {"web": service(), "ranker": gpu_service(graceful_shutdown_wait_loop_s=3.0)}
    return World(specs=specs, targets={"web": 2, "ranker": 3})


steps = st.tuples(st.sampled_from(OPS), st.integers(0, 40), st.sets(st.integers(1, 8), max_size=2))
NOTHING: tuple[str, int, set[int]] = ("tick", 0, set())
TOLD_AGAIN = [NOTHING, ("scale", 0, set[int]()), *[NOTHING] * 9, ("busy", 0, set[int]())]
"""A replica that misses its first SIGTERM, and gets requests before the second one."""


@settings(max_examples=300, deadline=None)
@example(TOLD_AGAIN)
@given(st.lists(steps, max_size=60))
def test_safe_at_every_step_and_converges_when_the_trouble_ends(ops: list[tuple[str, int, set[int]]]) -> None:
    world = new_world()
    for op, pick, fails in ops:
        world.disturb(op, pick)
        result = world.plan()
        check_safety(world, result)
        world.apply(result, set(fails))
        world.let_time_pass()

    world.haproxy_up = True
    world.kept.clear()
    for _ in range(400):
        result = world.plan()
        check_safety(world, result)
        world.apply(result, set())
        world.let_time_pass()
        for name in list(world.containers):
            world.disturb("idle", sorted(world.containers).index(name))
    check_converged(world)


def check_converged(world: World) -> None:
    result = world.plan()
    assert str(result).replace("pending ranker", "").count("#") == 0, str(result)
    for name, target in world.targets.items():
        fits = min(target, len(world.gpus)) if name == "ranker" else target
        running = [c for c in world.containers.values() if c.service == name and world.phase(c) is Phase.RUNNING]
        assert len(running) == fits
        assert {c.version for c in running} <= {version(world.specs[name])}, "everything is of the new version"
    assert set(world.servers) == {c.name for c in world.containers.values() if c.service == "web"}


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, max_size=30))
def test_plans_are_deterministic_and_never_repeat_an_action_in_progress(ops: list[tuple[str, int, set[int]]]) -> None:
    world = new_world()
    for op, pick, fails in ops:
        world.disturb(op, pick)
        result = world.plan()
        world.containers = dict(reversed(world.containers.items()))
        assert str(world.plan()) == str(result), "the order of what is seen does not matter"
        in_progress = tuple(step.action for step in result.steps)
        again = world.plan(in_progress)
        busy = {action.target for action in in_progress}
        repeated = [step.action for step in again.steps if step.action.target in busy]
        assert not repeated, "a target in progress is left alone"
        created = [step.action for step in (*result.steps, *again.steps) if isinstance(step.action, CreateContainer)]
        uuids = [gpu.uuid for action in created for gpu in action.gpus]
        assert len(uuids) == len(set(uuids))
        going = {a.target for a in in_progress if isinstance(a, BeginRetirement | RemoveContainer)}
        for name, target in world.targets.items():
            alive = [
                c
                for c in world.containers.values()
                if c.service == name and world.phase(c).serves_or_will and c.name not in going
            ]
            total = len(alive) + sum(action.service == name for action in created)
            most = target + max(1, world.specs[name].rollout.max_surge)
            assert total <= max(most, len(alive)), "what is being created counts"
        world.apply(result, set(fails))
        world.let_time_pass()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.sampled_from(PACES), st.sets(st.integers(0, 5)))
def test_a_rollout_ends_although_haproxy_never_reaches_some_of_the_old_ones(
    target: int, pace: RolloutSpec, unreached: set[int]
) -> None:
    """At every step HAProxy reaches as many as before, except for those that `max_unavailable` allows."""
    spec = service(replicas=target, rollout=pace)
    world = World(specs={"web": spec}, targets={"web": target})
    for _ in range(20):
        world.apply(world.plan(), set())
        world.let_time_pass()
    check_converged(world)

    for index, name in enumerate(sorted(world.servers)):
        world.change_server(name, up=index not in unreached)
    least = min(world.reached(), target - pace.max_unavailable)
    world.specs["web"] = replace(spec, definition_hash="d2")
    for _ in range(40 * target):
        result = world.plan()
        check_safety(world, result)
        world.apply(result, set())
        assert world.reached() >= least
        world.let_time_pass()
    check_converged(world)


ON_A_MACHINE = st.sampled_from(["tick", "tick", "ready", "crash", "scale", "version", "memory", "load"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(ON_A_MACHINE, st.integers(0, 60)), max_size=40))
def test_no_more_is_started_than_the_machine_has_memory_and_time_for(ops: list[tuple[str, int]]) -> None:
    world = new_world()
    world.memory = 40
    for op, pick in ops:
        match op:
            case "memory":
                world.memory = pick
            case "load":
                world.load = pick % 2 * (MOST_LOAD_PER_CORE + 1)
            case "scale":
                world.targets["web"] = pick
            case _:
                world.disturb(op, pick)
        check_room(world, world.plan())
        world.apply(world.plan(), set())
        world.let_time_pass()
    world.memory, world.load = 200, 0.0
    for _ in range(400):
        result = world.plan()
        check_room(world, result)
        world.apply(result, set())
        world.let_time_pass()
    check_converged(world)


def check_room(world: World, result: Plan) -> None:
    starts = sum(isinstance(step.action, CreateContainer) for step in result.steps)
    coming = [
        c for c in world.containers.values() if c.health is ReplicaHealth.UNKNOWN and world.phase(c).serves_or_will
    ]
    running = sum(c.state.is_up for c in world.containers.values())
    if starts:
        assert running + starts <= (world.memory or 0), "there is memory for all"
        assert starts + len(coming) <= LEAST_STARTS, "few start at a time"
        assert not world.load or starts + len(coming) == 1, "one after the other where there is no time"
