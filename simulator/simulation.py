"""Runs the controller's own decisions against a trace, in simulated time.

`Scaler` (with `autoscale.decide` and the service's policy) and `plan` are those of a real stack. Only the world
(`world.py`) and the clock are simulated. The same arguments give the same result.

    arrivals, ends of requests, replicas that become ready ------------+
                                                                       +--> in order of time
    the controller's ticks: every second, and soon after an event -----+
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from controller.desired.functions import Functions
from controller.desired.policies import Policies
from controller.desired.scaler import Scaler
from controller.desired.targets import targets_of
from controller.model.desired import Desired
from controller.model.plan import Plan
from controller.model.spec import AutoscaleSpec, PrometheusPolicy, ServiceSpec, Spec
from controller.plan import plan as make_plan
from controller.plan.failures import obsolete_failures
from controller.storage.events import EventLog
from controller.storage.file import StateFile
from controller.storage.store import StateStore

from .distributions import Distribution, parse_distribution
from .traces import Trace
from .world import PROJECT, Happening, Replica, Requests, SimulatedWorld

LOOK_S = 1.0
"""Longest time between two ticks, as in the loop."""
NEWS_S = 0.02
"""From an event to the tick that it causes, as in the loop."""
MOST_EVENTS = 1000


@dataclass(frozen=True, slots=True)
class Setting:
    """The service's replicas."""

    service_time: Distribution = field(default_factory=lambda: parse_distribution("service_time", "exp:0.1"))
    start_time: Distribution = field(default_factory=lambda: parse_distribution("start_time", "10"))
    places: int | None = None
    """Requests that a replica works on at a time; None = max_ongoing_requests."""
    begin: int | None = None
    """Replicas that are ready at the beginning; None = the autoscaler's own number."""
    failing_starts: float = 0.0
    """Fraction of the starts that fail, 0 to 1."""
    gpus: int | None = None
    """GPUs of the machine; None = as many as are needed."""
    seed: int = 0
    policy_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one tick."""

    at_s: float
    wanted: int
    """Replicas that the policy asks for at that moment."""
    target: int
    ready: int
    present: int
    """Replicas whose containers run, ready or not."""
    in_work: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the controller, as `make events` would show it."""

    at_s: float
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a simulation."""

    spec: ServiceSpec
    autoscale: AutoscaleSpec
    trace: Trace
    setting: Setting
    samples: tuple[Sample, ...]
    events: tuple[Happened, ...]
    requests: Requests
    starts: int
    failed_starts: int


def simulate(spec: ServiceSpec, trace: Trace, setting: Setting | None = None) -> Result:
    """Run a service that has an `autoscale` block against a trace."""
    setting = setting or Setting()
    with tempfile.TemporaryDirectory(prefix="pierhead-simulate-") as directory, _quiet():
        store = StateStore(StateFile(Path(directory)))
        try:
            return _Simulation(spec, trace, setting, store).run()
        finally:
            store.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep simulated events out of the log, which has real times; they are in the result."""
    logger = logging.getLogger("controller")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def seeded(seed: int, of: str) -> Random:
    """A generator for each purpose: one more start of a replica must not change the work of the requests."""
    return Random(f"{seed} {of}")  # noqa: S311 - it must be repeatable, not unpredictable


class _Simulation:
    def __init__(self, spec: ServiceSpec, trace: Trace, setting: Setting, store: StateStore) -> None:
        autoscale = spec.autoscale
        if autoscale is None:
            raise AssertionError("internal: a service without an autoscale block is simulated")
        if setting.gpus is None:
            spec = replace(spec, gpu=None)
        self._spec, self._autoscale, self._trace, self._setting = spec, autoscale, trace, setting
        self._project = Spec(PROJECT, {spec.name: spec})
        self._now = 0.0
        self._heap: list[tuple[float, int, Happening, Replica, int]] = []
        self._serial = 0
        self._store = store
        self._events = EventLog(store, lambda: self._now)
        functions = Functions(setting.policy_dir)
        policies = Policies(lambda name, policy, seen: functions.call(policy, seen), self._utilisation)
        self._scaler = Scaler(store, self._events, policies.ask)
        self._world = SimulatedWorld(
            spec,
            store,
            setting.start_time,
            seeded(setting.seed, "starts"),
            self._later,
            places=setting.places or spec.max_ongoing_requests,
            failing_starts=setting.failing_starts,
            gpus=setting.gpus or 0,
        )
        self._samples: list[Sample] = []
        self._busy: list[float] = []
        self._busy_value: float | None = None
        self._busy_read_at = -1e9

    def run(self) -> Result:
        """Run to the end of the trace."""
        begin = self._setting.begin
        self._world.begin_with(self._autoscale.first if begin is None else begin, 0.0)
        # Its own generator: the same trace has the same work whatever is decided.
        rng, needs = seeded(self._setting.seed, "work"), self._trace.service_times
        sample, times = self._setting.service_time.sample, self._trace.times
        arrived, count, end, look_at = 0, len(times), self._trace.duration_s, 0.0
        while True:
            arrival = times[arrived] if arrived < count else float("inf")
            happening = self._heap[0][0] if self._heap else float("inf")
            now = self._now = min(arrival, happening, look_at)
            if now > end:
                break
            if now == arrival:
                self._world.arrive(needs[arrived] if needs is not None else sample(rng), now)
                arrived += 1
            elif now == happening:
                if self._happen(now):
                    look_at = min(look_at, now + NEWS_S)
            else:
                look_at = now + self._look(now)
        return self._result()

    def _later(self, at: float, happening: Happening, replica: Replica, request: int) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, happening, replica, request))

    def _happen(self, now: float) -> bool:
        """Carry out the next event; return whether it wakes the controller."""
        _, _, happening, replica, request = heapq.heappop(self._heap)
        match happening:
            case "finished":
                self._world.finish(replica, request, now)
                return replica.stopping
            case "ready":
                self._world.become_ready(replica, now)
            case "exited":
                self._world.fail(replica)
        return True

    def _look(self, now: float) -> float:
        """One tick of the controller; return the seconds until the next one."""
        self._world.expire(now)
        observed = self._world.observed(now)
        self._busy.append(self._world.utilisation)
        targets = self._scaler.targets(self._project.services, observed, now)
        wanted = targets_of(self._project, {}, targets)
        desired = Desired(self._project.project, self._project.services, wanted)
        plan = make_plan(desired, observed, now)
        for step in plan.steps:
            self._world.perform(step.action, now)
        for service in obsolete_failures(desired, observed, now):
            self._store.failures.drop(service)
        self._note(targets, now)
        return self._pause_s(plan, now)

    def _pause_s(self, plan: Plan, now: float) -> float:
        if plan.steps:
            return NEWS_S
        dues = (LOOK_S, plan.next_look_s, self._scaler.due_in_s(self._project.services, now))
        return max(min(due for due in dues if due is not None), NEWS_S)

    def _note(self, targets: Mapping[str, int], now: float) -> None:
        name, world = self._spec.name, self._world
        sample = Sample(
            now,
            self._scaler.rows[name].wanted,
            targets[name],
            world.ready,
            world.present,
            world.in_work,
            len(world.queue),
        )
        self._samples.append(sample)

    def _utilisation(self, service: str, policy: PrometheusPolicy, now: float) -> float | None:
        """Stand in for a query: percent of the replicas' places that are taken, on average since the last query."""
        if now - self._busy_read_at >= policy.period_s and self._busy:
            self._busy_value = sum(self._busy) / len(self._busy)
            self._busy_read_at = now
            self._busy.clear()
        return self._busy_value

    def _result(self) -> Result:
        events = [stored.event for stored in self._events.select(limit=MOST_EVENTS)]
        return Result(
            self._spec,
            self._autoscale,
            self._trace,
            self._setting,
            tuple(self._samples),
            tuple(Happened(event.at, event.kind, event.message) for event in events),
            self._world.requests,
            self._world.starts,
            self._world.failed_starts,
        )
