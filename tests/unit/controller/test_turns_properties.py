"""Services that take turns on GPUs, under random requests in simulated time.

Scaler, demands and planner are the real ones; containers that start, work, drain and stop are simulated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.desired.autoscale import by_load
from controller.desired.demands import Demands
from controller.desired.scaler import Scaler
from controller.desired.targets import targets_of, together
from controller.model.actions import (
    Action,
    AddServer,
    BeginRetirement,
    CreateContainer,
    DeleteServer,
    PutToSleep,
    RemoveContainer,
    SetServerState,
    SignalContainer,
    StartContainer,
    WakeReplica,
)
from controller.model.desired import Desired
from controller.model.machine import Machine
from controller.model.observed import Observed
from controller.model.plan import Plan
from controller.model.spec import AutoscaleSpec, ServiceSpec, Spec, YieldSpec, backend_name
from controller.model.world import (
    ContainerState,
    GpuReading,
    HeldRequests,
    ReplicaHealth,
    Retirement,
    RoutingState,
    ServerState,
    SleepReport,
)
from controller.plan import plan
from tests.unit.controller.worlds import IMAGE_ID, PROJECT, gpu_service, gpus, replica, server

TICK_S = 0.5
START_S, STOP_S, WORK_S = 4.0, 1.0, 2.0
FALL_ASLEEP_S, WAKE_UP_S = 1.0, 1.0
STAY_S, IDLE_S = 20.0, 3.0
TURN_S = START_S + STAY_S + WORK_S + STOP_S + 6 * TICK_S
"""How long one service can keep another from a GPU: what it does, and the ticks in between."""
ASKED_S = 200
NAMES = ("a", "b", "c", "d")
CARD = 80 * 1024**3
"""A GPU's memory."""


@dataclass(frozen=True)
class Sleeping:
    """How replicas sleep, and what there is for them."""

    memory: int = 9
    """For how many of them the machine has memory."""
    residue: int = 0
    """Bytes that each keeps of its GPU."""
    short: range = range(0)
    """Seconds in which something else has the machine's memory."""
    defects: dict[str, str] = field(default_factory=dict)
    """By service: "cannot", "cannot fall asleep", "never falls asleep" or "cannot wake up"."""


def model(name: str, group: str | None = None) -> ServiceSpec:
    yields = YieldSpec(idle_s=IDLE_S, min_stay_s=STAY_S, group=group)
    return gpu_service(name, route=f"/{name}", replicas=0, autoscale=AutoscaleSpec(min=0, max=1), yields=yields)


@dataclass(eq=False)
class Process:
    """A container and the process in it."""

    action: CreateContainer
    id: str
    started_at: float | None = None
    stopped_at: float | None = None
    work: list[float] = field(default_factory=list)
    """When each request in it is done."""
    answered: int = 0
    server: ServerState | None = None
    sleep: SleepReport | None = None
    turns_at: float | None = None
    """When it does what was wanted of its sleep last."""
    awake_since: float = 0.0

    @property
    def has_gpu(self) -> bool:
        """Whether it may use the memory of its GPUs."""
        return self.sleep is None or not (self.sleep.asleep and self.sleep.wanted)

    def tell(self, wanted: bool, now: float) -> None:
        assert self.sleep is not None
        if self.sleep.wanted is not wanted:
            self.turns_at = now + (FALL_ASLEEP_S if wanted else WAKE_UP_S)
            self.sleep = replace(self.sleep, wanted=wanted)

    def turn(self, defect: str, now: float) -> None:
        """Fall asleep, or wake up, if it is time for that."""
        if self.sleep is None or self.turns_at is None or now < self.turns_at:
            return
        wanted, self.turns_at = self.sleep.wanted, None
        if defect == ("cannot fall asleep" if wanted else "cannot wake up"):
            self.sleep = replace(self.sleep, error="no memory")
        elif not (wanted and defect == "never falls asleep"):
            self.sleep, self.awake_since = replace(self.sleep, asleep=wanted), now


@dataclass
class World:
    """What the planner observes and changes."""

    specs: dict[str, ServiceSpec]
    cards: int
    sleeping: Sleeping | None = None
    """None = no replica can sleep."""
    now: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    retirements: dict[str, Retirement] = field(default_factory=dict)
    held: dict[str, list[float]] = field(default_factory=dict)
    """By service: when each request that is held arrived."""
    waits: list[tuple[str, float]] = field(default_factory=list)
    """The seconds that each request was held, by service."""
    made: int = 0
    lost: int = 0
    woken: int = 0

    def ready_since(self, process: Process) -> float | None:
        started, report = process.started_at, process.sleep
        if started is None or self.now < started + START_S or (report and (report.wanted or report.asleep)):
            return None
        return max(started + START_S, process.awake_since)

    def health(self, process: Process) -> ReplicaHealth:
        report = process.sleep
        if report and report.error and not report.wanted:
            return ReplicaHealth.FAILED
        return ReplicaHealth.UNKNOWN if self.ready_since(process) is None else ReplicaHealth.READY

    def reading(self) -> GpuReading:
        used = Counter[str]()
        for process in self.processes.values():
            if self.sleeping and process.started_at is not None and not self.has_exited(process):
                amount = CARD // 2 if process.has_gpu else self.sleeping.residue
                used.update({gpu.uuid: amount for gpu in process.action.gpus})
        return GpuReading(self.now, used)

    def machine(self) -> Machine | None:
        if self.sleeping is None:
            return None
        asleep = sum(one.sleep is not None and one.sleep.asleep for one in self.processes.values())
        free = (self.sleeping.memory + 1) * CARD - asleep * CARD
        assert free > 0, "more sleep than there is memory for"
        return Machine(16, 1024 * CARD, 0 if self.now in self.sleeping.short else free, 10_000, 0, 0.0)

    def has_exited(self, process: Process) -> bool:
        return process.stopped_at is not None and self.now >= process.stopped_at + STOP_S

    def pass_time(self) -> None:
        """Let processes finish requests and exit, and send held requests to what is in rotation."""
        self.now += TICK_S
        for process in self.processes.values():
            done = [at for at in process.work if at <= self.now]
            process.answered += len(done)
            process.work = [at for at in process.work if at > self.now]
            process.turn(self.sleeping.defects.get(process.action.service, "") if self.sleeping else "", self.now)
            assert not (process.work and process.sleep and process.sleep.wanted), "a request reaches one that sleeps"
            takes = self.ready_since(process) is not None and process.server is ServerState.READY
            if takes and process.stopped_at is None:
                for began in self.held.pop(process.action.service, []):
                    self.waits.append((process.action.service, self.now - began))
                    process.work.append(self.now + WORK_S)

    def observed(self) -> Observed:
        containers, servers = [], []
        for number, process in enumerate(self.processes.values()):
            ready, spec = self.ready_since(process), self.specs[process.action.service]
            has_exited = self.has_exited(process)
            state = ContainerState.CREATED if process.started_at is None else ContainerState.RUNNING
            one = replica(
                spec,
                process.action.number,
                id=process.id,
                ip=f"10.0.0.{number + 1}",
                state=ContainerState.EXITED if has_exited else state,
                exit_code=0 if has_exited else None,
                gpus=tuple(gpu.uuid for gpu in process.action.gpus),
                created_at=self.now,
                started_at=process.started_at,
                health=self.health(process),
                health_detail="it does not wake up" if self.health(process) is ReplicaHealth.FAILED else "",
                sleep=None if has_exited else process.sleep,
                ready_since=ready,
                ongoing=len(process.work),
                ongoing_at=self.now,
                used=process.answered,
            )
            containers.append(one)
            if process.server is not None:
                servers.append(server(one, spec.port, state=process.server, sessions=len(process.work)))
        held = {backend_name(name): HeldRequests(now=len(waiting)) for name, waiting in self.held.items()}
        backends = frozenset(map(backend_name, self.specs))
        return Observed(
            containers=tuple(containers),
            images={spec.image: IMAGE_ID for spec in self.specs.values()},
            gpus=tuple(replace(gpu, memory_bytes=CARD if self.sleeping else None) for gpu in gpus(self.cards)),
            gpu_reading=self.reading() if self.sleeping else None,
            machine=self.machine(),
            routing=RoutingState(7, 0.0, "3.0.11", "", tuple(servers), backends, held=held),
            retirements=dict(self.retirements),
        )

    def perform(self, action: Action) -> None:  # noqa: C901 - one branch an action
        process = self.processes.get(action.target)
        match action:
            case CreateContainer():
                self.made += 1
                can = self.sleeping is not None and self.sleeping.defects.get(action.service) != "cannot"
                report = SleepReport(can, wanted=False, asleep=False) if self.sleeping else None
                self.processes[action.target] = Process(action, f"c{self.made}", sleep=report)
            case RemoveContainer():
                del self.processes[action.target]
                self.retirements.pop(action.container_id, None)
            case BeginRetirement():
                self.retirements[action.container_id] = Retirement(
                    action.target, action.container_id, self.now, None, action.cause, action.failed
                )
            case _ if process is None:
                pass
            case StartContainer():
                process.started_at = self.now
            case SignalContainer():
                process.stopped_at = self.now
                self.lost += len(process.work)
                self.retirements[process.id] = replace(self.retirements[process.id], stopping_since=self.now)
            case PutToSleep():
                mark = self.retirements[process.id]
                self.retirements[process.id] = replace(mark, sleeping_since=mark.sleeping_since or self.now)
                process.tell(True, self.now)
            case WakeReplica():
                self.woken += 1
                self.retirements.pop(process.id, None)
                process.tell(False, self.now)
            case AddServer():
                process.server = ServerState.READY
            case SetServerState():
                process.server = action.state
            case DeleteServer():
                process.server = None
            case _:
                pass


class Rows(dict[str, int]):
    """Rows of the store, in memory."""

    put = dict.__setitem__
    drop = dict.__delitem__


def controller(specs: dict[str, ServiceSpec]) -> Any:
    """Scaler and demands, as the loop asks them: (what is observed, the last plan, now) -> the desired state."""
    events = SimpleNamespace(record=lambda *_, **__: None)
    scaler = Scaler(
        cast(Any, SimpleNamespace(overrides={}, autoscaled=Rows())), cast(Any, events), lambda _, of: by_load(of)
    )
    demands = Demands()

    def desire(observed: Observed, previous: Plan, now: float) -> Desired:
        for name, why in previous.gives_way.items():
            scaler.sleep(name, why)
        autoscaled = scaler.targets(specs, observed, now)
        found = demands.look(specs, (), observed, now)
        targets = together(specs, targets_of(Spec(PROJECT, specs), {}, autoscaled), found)
        return Desired(PROJECT, specs, targets, demands=found)

    return desire


@dataclass(frozen=True)
class Traffic:
    """How each service is asked for ASKED_S seconds: every so many seconds, and at times of its own."""

    endless: tuple[int, ...]
    """By service: seconds between two requests; 0 = none."""
    times: tuple[tuple[int, ...], ...]

    def count(self, service: int, at: float) -> int:
        every, whole = self.endless[service], at == int(at) and at < ASKED_S
        return int(whole and every > 0 and at % every == 0) + (self.times[service].count(int(at)) if whole else 0)


def run(specs: dict[str, ServiceSpec], cards: int, traffic: Traffic, sleeping: Sleeping | None = None) -> World:
    """Run it until everything has been answered; the properties that hold at each moment are asserted on the way."""
    world, desire, previous = World(specs, cards, sleeping), controller(specs), Plan()
    arrived = 0
    while world.now < ASKED_S or (world.held and world.now < 3 * ASKED_S):
        world.pass_time()
        for number, name in enumerate(NAMES[: len(specs)]):
            count = traffic.count(number, world.now) if specs[name].yields else 0
            arrived += count
            if count:
                world.held.setdefault(name, []).extend([world.now] * count)
        observed = world.observed()
        wanted = desire(observed, previous, world.now)
        previous = plan(wanted, observed, world.now)
        check(specs, world, observed, previous)
        for step in previous.steps:
            world.perform(step.action)
    assert not world.held, f"never answered: {world.held}; {previous}"
    assert world.lost == 0
    assert len(world.waits) == arrived
    return world


def settle(specs: dict[str, ServiceSpec], world: World) -> None:
    """Nothing is planned once nothing happens any more, and then nothing is left of services that are gone."""
    desire, previous = controller(specs), Plan()
    for wanted in (specs, {name: spec for name, spec in specs.items() if not spec.yields}):
        for _ in range(100):
            world.pass_time()
            observed = world.observed()
            found = desire(observed, previous, world.now)
            previous = plan(replace(found, services=wanted), observed, world.now)
            check(specs, world, observed, previous)
            for step in previous.steps:
                world.perform(step.action)
        assert not previous.steps, previous
    assert {process.action.service for process in world.processes.values()} == wanted.keys()


def check(specs: dict[str, ServiceSpec], world: World, observed: Observed, planned: Plan) -> None:
    using = [process for process in world.processes.values() if process.has_gpu]
    owners = Counter(gpu.uuid for process in using for gpu in process.action.gpus)
    assert max(owners.values(), default=0) <= 1, owners
    by_name = {container.name: container for container in observed.containers}
    present = {one.service for one in observed.containers if one.id not in observed.retirements}
    for step in planned.steps:
        if isinstance(step.action, BeginRetirement) and "gives way" in step.action.cause:
            service, container = step.action.service, by_name[step.action.target]
            assert specs[service].yields, f"{service} has no such word"
            assert container.ready_since is not None
            assert world.now >= container.ready_since + STAY_S, "before its stay is over"
            lacks = {name for name in specs if name not in present}
            assert {name for name in lacks if world.held.get(name) or not specs[name].yields}, "for nobody"


ENDLESS = st.sampled_from([0, 0, 1, 2, 5, 7])
TIMES = st.lists(st.integers(1, ASKED_S - 1), max_size=6).map(tuple)


@given(st.integers(2, 4), st.integers(1, 2), st.data())
def test_no_request_is_lost_and_each_waits_at_most_its_bound(services: int, cards: int, data: st.DataObject) -> None:
    specs = {name: model(name) for name in NAMES[:services]}
    if cards == 2 and data.draw(st.booleans(), "one is pinned"):
        specs["a"] = gpu_service("a", route="/a", replicas=1)
    elif cards == 2 and data.draw(st.booleans(), "two are a group"):
        specs |= {name: model(name, group="together") for name in "ab"}
    endless = data.draw(st.tuples(*[ENDLESS] * services), "endless")
    traffic = Traffic(endless, data.draw(st.tuples(*[TIMES] * services), "times"))
    world = run(specs, cards, traffic)
    longest = max((waited for _, waited in world.waits), default=0.0)
    assert longest <= services * TURN_S


def test_two_that_are_asked_without_end_alternate() -> None:
    world = run({name: model(name) for name in "ab"}, 1, Traffic((1, 1), ((), ())))
    longest = {name: max(waited for service, waited in world.waits if service == name) for name in "ab"}
    assert max(longest.values()) <= 2 * TURN_S
    assert ASKED_S / TURN_S - 2 <= world.made <= ASKED_S / STAY_S + 2, "each stays, and none stays for good"


def test_a_group_has_all_its_replicas_or_gives_way_whole() -> None:
    specs = {"a": model("a", "pair"), "b": model("b", "pair"), "c": model("c")}
    world = run(specs, 2, Traffic((3, 0, 3), ((), (), ())))
    assert max(waited for _, waited in world.waits) <= 2 * TURN_S


def test_one_that_is_used_less_gives_way_first() -> None:
    specs = {name: model(name) for name in "abc"}
    world = run(specs, 2, Traffic((1, 0, 0), ((), (2,), (60,))))
    assert {process.action.service for process in world.processes.values()} == {"a", "c"}


DEFECTS = st.sampled_from(["", "", "", "cannot", "cannot fall asleep", "never falls asleep", "cannot wake up"])
RESIDUES = st.sampled_from([0, CARD // 160, CARD // 40])
"""None, half a GiB, and 2 GiB, with which no other replica is placed there."""


@settings(max_examples=25)
@given(st.integers(2, 4), st.integers(1, 2), st.data())
def test_those_that_sleep_wake_when_they_are_asked_and_leave_when_others_need_the_memory(
    services: int, cards: int, data: st.DataObject
) -> None:
    specs = {name: model(name) for name in NAMES[:services]}
    if cards == 2 and data.draw(st.booleans(), "two are a group"):
        specs |= {name: model(name, group="together") for name in "ab"}
    begin = data.draw(st.integers(0, ASKED_S), "short from")
    short = range(begin, begin + data.draw(st.sampled_from([0, 0, 30]), "short for"))
    defects = {name: data.draw(DEFECTS, f"the defect of {name}") for name in specs}
    sleeping = Sleeping(data.draw(st.integers(0, 3), "memory"), data.draw(RESIDUES, "residue"), short, defects)
    endless = data.draw(st.tuples(*[ENDLESS] * services), "endless")
    traffic = Traffic(endless, data.draw(st.tuples(*[TIMES] * services), "times"))
    world = run(specs, cards, traffic, sleeping)
    settle(specs, world)
    if not short and not any(defects.values()):
        longest = max((waited for _, waited in world.waits), default=0.0)
        assert longest <= services * (TURN_S + STOP_S + 6 * TICK_S)


def test_two_that_sleep_are_started_once_each() -> None:
    world = run({name: model(name) for name in "ab"}, 1, Traffic((1, 1), ((), ())), Sleeping())
    assert (world.made, world.woken > 3) == (2, True)
