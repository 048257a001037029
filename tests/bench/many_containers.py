"""A stack with many replicas: `python -m tests.bench.many_containers --replicas 200 --then 50 --seconds 60`.

Takes up a stack of its own with a tiny service, scales it from 0 to so many replicas and then back to fewer, and
watches it at rest with each number. Writes what the controller and HAProxy did to tests/bench/results, and removes
everything. The images must have been built (`make build`); `PIERHEAD_TAG` says which.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import psutil
from prometheus_client.parser import text_string_to_metric_families

from controller.daemon.apply import PARALLEL_ACTIONS
from controller.engines.docker_reader import timestamp
from controller.observe.watch import PATIENCE_S
from tests.bench import controller_at_rest
from tests.bench.record import Page, Table, directory_of, run_facts
from tests.bench.targets import Line
from tests.harness.stack import Answer, Stack
from tests.harness.waiting import eventually

PROJECT = "pierhead-bench-many"
LIMIT_S = 900.0
SETTLE_S = 20.0
"""Start-up work (first probes, the engine's own) is not rest."""
TICK_S, BEYOND_S, MEMORY_MB, CPU_PERCENT = 0.2, 5.0, 150.0, 5.0
"""What is promised: a tick with 200 replicas, convergence beyond the starts, memory and CPU with 50."""
ENGINE = ("dockerd", "containerd")


@dataclass(frozen=True)
class Ticks:
    """The controller's own histogram over a span of time. Seconds."""

    count: int
    mean_s: float
    longest_s: float
    """Not more than this (the upper end of the last bucket that is not empty)."""
    within: float
    """Share of those that took TICK_S at most."""

    def __str__(self) -> str:
        return (
            f"{self.count}, mean {1000 * self.mean_s:.0f} ms, longest <= {1000 * self.longest_s:.0f} ms, "
            f"{100 * self.within:.1f} % within {1000 * TICK_S:.0f} ms"
        )


@dataclass(frozen=True)
class Start:
    """One replica; seconds since the scale call."""

    created_s: float
    started_s: float
    serving_s: float
    """HAProxy sends requests to it."""


@dataclass(frozen=True)
class Growth:
    """From none to all of them."""

    replicas: int
    seconds: float
    """From the scale call until the last one takes traffic."""
    starts: Sequence[Start]
    ticks: Ticks
    cpu_s: float
    """Of the controller."""
    engine_cpu_s: float
    """Of dockerd and containerd."""
    readings: Ticks | None = None
    """Readings of the engine, which run outside the ticks."""
    core_wait_s: float = 0.0
    """The same of all that the controller's event loop does, ticks included."""
    haproxy_readings: Ticks | None = None
    """Readings of HAProxy, which run outside the ticks, too."""

    @property
    def engine_done_s(self) -> float:
        """When the engine had started the last container."""
        return max(start.started_s for start in self.starts)

    @property
    def slowest_s(self) -> float:
        """The longest time from a container's start until it takes traffic."""
        return max(start.serving_s - start.started_s for start in self.starts)

    @property
    def beyond_s(self) -> float:
        """From the start of the last container until all take traffic."""
        return self.seconds - self.engine_done_s

    @property
    def most_starting(self) -> int:
        """Most replicas at one time that were started and did not take traffic yet."""
        changes = [(start.started_s, 1) for start in self.starts] + [(start.serving_s, -1) for start in self.starts]
        return max(accumulate(step for _, step in sorted(changes)))


@dataclass(frozen=True)
class Rest:
    """With so many replicas and nothing to do."""

    replicas: int
    seconds: float
    cpu_percent: float
    """Of one core."""
    resident_mb: float
    ticks: Ticks
    elsewhere_cores: float
    """What everything else on the machine used during it."""


@dataclass
class Found:
    """All of a run."""

    service: str
    growth: Growth
    rests: list[Rest] = field(default_factory=list)
    shrink_s: float | None = None
    haproxy_worker: tuple[int, int] = (0, 0)
    """Process ids before the first replica and after the last change."""
    routing_writes: int = 0
    """Files of routes that were written, and so reloads, between these two."""


class Events(threading.Thread):
    """Collects a stack's events, however many there are."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        self._over = threading.Event()
        self.found: list[Mapping[str, Any]] = []

    def run(self) -> None:
        """Ask until `end`."""
        following = 0
        while not self._over.wait(1.0):
            told = self._stack.api(f"/api/v1/events?since={following}&limit=1000").json
            following = told["next"]
            self.found += told["events"]

    def end(self) -> None:
        """Stop, when the last events have been read."""
        time.sleep(2.0)  # one more round
        self._over.set()
        self.join(timeout=30)

    def of(self, kind: str, since: float = 0.0) -> list[Mapping[str, Any]]:
        """Those of a kind."""
        return [event for event in self.found if event["kind"] == kind and event["at"] >= since]


TICKS = "pierhead_controller_tick_seconds"
READINGS = "pierhead_controller_engine_reading_seconds"
HAPROXY_READINGS = "pierhead_controller_haproxy_reading_seconds"


class Answering(Protocol):
    """What reaches a controller's API."""

    def api(self, path: str) -> Answer:
        """The answer to a GET."""
        ...


class TickBook:
    """Reads one of the controller's histograms, of ticks as a rule: what was added since the last reading."""

    def __init__(self, stack: Answering, name: str = TICKS, within_s: float = TICK_S) -> None:
        self._stack = stack
        self._name = name
        self._within_s = within_s
        self._before = self._read()

    def lap(self) -> Ticks:
        """Ticks since the last lap."""
        now = self._read()
        before, self._before = self._before, now
        name = self._name
        count = round(now[f"{name}_count"] - before[f"{name}_count"])
        total = now[f"{name}_sum"] - before[f"{name}_sum"]
        buckets = {float(key): now[key] - before[key] for key in now if not key.startswith(name)}
        longest = min((bound for bound, found in buckets.items() if found >= count), default=float("inf"))
        return Ticks(count, round(total / max(count, 1), 4), longest, round(buckets[self._within_s] / max(count, 1), 4))

    def _read(self) -> dict[str, float]:
        page = self._stack.api("/metrics").body.decode()
        samples = [
            sample
            for family in text_string_to_metric_families(page)
            if family.name == self._name
            for sample in family.samples
        ]
        return {sample.labels.get("le", sample.name): sample.value for sample in samples}


def engine_cpu_s() -> float:
    """CPU seconds of dockerd and containerd so far."""
    found = [process for process in psutil.process_iter(["name"]) if process.info["name"] in ENGINE]
    return sum(sum(process.cpu_times()[:2]) for process in found)


def core_wait_s(pid: int) -> float:
    """Seconds that a process's first thread has waited for a core so far (schedstat of proc, the second number)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def grow(stack: Stack, service: str, replicas: int, events: Events, book: TickBook) -> Growth:
    """Scale from none to `replicas`; return when all take traffic."""
    pid = int(stack.container("controller").attrs["State"]["Pid"])
    before, engine_before, waited_before = controller_at_rest.cpu_s(pid), engine_cpu_s(), core_wait_s(pid)
    names = (READINGS, HAPROXY_READINGS)
    readings = {name: TickBook(stack, name) for name in names}
    book.lap()
    begun = time.time()
    stack.api(f"/api/v1/services/{service}/scale", "PUT", {"replicas": replicas})
    print(f"{service}: 0 -> {replicas}", flush=True)
    eventually(lambda: len(events.of("add_server", begun)) >= replicas, "all take traffic", LIMIT_S, every_s=0.5)
    ticks, cpu_s, waited_s = book.lap(), controller_at_rest.cpu_s(pid) - before, core_wait_s(pid) - waited_before
    engine_s = engine_cpu_s() - engine_before
    laps = {name: one.lap() for name, one in readings.items()}
    starts = starts_of(stack, service, events, begun)
    stack.wait_settled(60.0, **{service: replicas})
    return Growth(
        replicas,
        max(start.serving_s for start in starts),
        starts,
        ticks,
        round(cpu_s, 2),
        round(engine_s, 2),
        laps[READINGS],
        round(waited_s, 2),
        laps[HAPROXY_READINGS],
    )


def starts_of(stack: Stack, service: str, events: Events, begun: float) -> list[Start]:
    """How the replicas that are there now and came after `begun` (time.time()) were started."""
    serving = {event["target"]: event["at"] - begun for event in events.of("add_server", begun)}
    found = stack.replicas(service).items()
    return [_start(container.attrs, begun, serving[name]) for name, container in found if name in serving]


def _start(attrs: Mapping[str, Any], begun: float, serving_s: float) -> Start:
    created, started = timestamp(attrs["Created"]), timestamp(attrs["State"]["StartedAt"])
    assert created is not None
    assert started is not None
    return Start(round(created - begun, 3), round(started - begun, 3), round(serving_s, 3))


def rest(stack: Stack, replicas: int, seconds: float, book: TickBook) -> Rest:
    """Watch a stack that has nothing to do."""
    print(f"{replicas} replicas at rest", flush=True)
    time.sleep(SETTLE_S)
    book.lap()
    busy = _busy_s()
    cost = controller_at_rest.measure(stack, replicas, seconds)
    elsewhere = (_busy_s() - busy) / cost.seconds - cost.cpu_percent_of_one_core / 100
    return Rest(
        replicas,
        cost.seconds,
        cost.cpu_percent_of_one_core,
        cost.resident_mb,
        book.lap(),
        round(elsewhere, 2),
    )


def _busy_s() -> float:
    """CPU seconds that the whole machine has used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def run(stack: Stack, service: str, replicas: int, then: int, seconds: float) -> Found:
    """Up, grow, rest, shrink, rest."""
    stack.up()
    eventually(lambda: stack.service(service)["name"] == service, "the controller is up")
    eventually(lambda: "write_routing" in {event["kind"] for event in stack.events()}, "HAProxy has the routes")
    stack.api(f"/api/v1/services/{service}/scale", "PUT", {"replicas": 0})
    stack.wait_settled(**{service: 0})
    worker = stack.haproxy_worker()
    events, book = Events(stack), TickBook(stack)
    events.start()
    begun = time.time()
    found = Found(service, grow(stack, service, replicas, events, book))
    if seconds:
        found.rests.append(rest(stack, replicas, seconds, book))
    if seconds and then < replicas:
        shrinking = time.monotonic()
        stack.api(f"/api/v1/services/{service}/scale", "PUT", {"replicas": then})
        print(f"{service}: {replicas} -> {then}", flush=True)
        stack.wait_settled(LIMIT_S, **{service: then})
        found.shrink_s = round(time.monotonic() - shrinking, 1)
        found.rests.append(rest(stack, then, seconds, book))
    events.end()
    found.haproxy_worker = (worker, stack.haproxy_worker())
    found.routing_writes = len(events.of("write_routing", begun))
    return found


# --------------------------------------------------------------------------------------------------------------- words


def lines(found: Found) -> Iterator[Line]:
    """The promises. What was measured with another number of replicas than the promise names still counts above it."""
    growth = found.growth
    many = growth.replicas
    yield _tick_line(f"a tick while {many} replicas start", growth.ticks)
    for one in found.rests[:1]:
        yield _tick_line(f"a tick at rest, {one.replicas} replicas", one.ticks)
    yield Line(
        f"0 to {many} replicas",
        f"<= the slowest start + {BEYOND_S:g} s after the engine has started the last container",
        f"{growth.beyond_s:.1f} s after it; the slowest start took {growth.slowest_s:.1f} s",
        growth.beyond_s <= growth.slowest_s + BEYOND_S,
    )
    before, after = found.haproxy_worker
    yield Line(
        "reloads of HAProxy",
        "none",
        f"{found.routing_writes} files written; its worker is process {before} before, {after} after",
        not found.routing_writes and before == after,
    )
    for one in found.rests:
        if one.replicas >= 50:
            # The promises are about 50 replicas: figures of more are shown without a verdict.
            memory, cpu = one.resident_mb, one.cpu_percent
            yield Line(
                f"the controller at rest, {one.replicas} replicas: memory",
                f"< {MEMORY_MB:g} MB" if one.replicas == 50 else "",
                f"{memory:.0f} MB",
                memory < MEMORY_MB if one.replicas == 50 else None,
            )
            yield Line(
                f"the controller at rest, {one.replicas} replicas: CPU",
                f"< {CPU_PERCENT:g} % of a core" if one.replicas == 50 else "",
                f"{cpu:.1f} %",
                cpu < CPU_PERCENT if one.replicas == 50 else None,
            )


def _tick_line(what: str, ticks: Ticks) -> Line:
    share = f"{100 * ticks.within:.1f} % of {ticks.count}; mean {1000 * ticks.mean_s:.0f} ms"
    return Line(what, f"<= {1000 * TICK_S:.0f} ms", share, ticks.within == 1.0)


def page(found: Found, facts: Mapping[str, Any]) -> Page:
    """What people read."""
    growth = found.growth
    own = [start.serving_s - start.started_s for start in growth.starts]
    rows = [
        ["all take traffic after", f"{growth.seconds:.1f} s"],
        ["the engine had started the last container after", f"{growth.engine_done_s:.1f} s"],
        [
            "a replica's own start, until it takes traffic",
            f"median {statistics.median(own):.2f} s, slowest {max(own):.2f} s",
        ],
        ["most that were starting at one time", str(growth.most_starting)],
        ["CPU time of dockerd and containerd", f"{growth.engine_cpu_s:.1f} s"],
        ["CPU time of the controller", f"{growth.cpu_s:.1f} s"],
        ["how long its event loop waited for a core", f"{growth.core_wait_s:.1f} s"],
        ["ticks", str(growth.ticks)],
    ]
    if growth.readings is not None:
        rows.append(["readings of the engine", str(growth.readings)])
    if growth.haproxy_readings is not None:
        rows.append(["readings of HAProxy", str(growth.haproxy_readings)])
    if found.shrink_s is not None:
        rows.append([f"from {growth.replicas} to {found.rests[-1].replicas}", f"{found.shrink_s:.1f} s"])
    at_rest = [
        [
            str(one.replicas),
            f"{one.cpu_percent:.1f} % of a core",
            f"{one.resident_mb:.0f} MB",
            str(one.ticks),
            f"{one.elsewhere_cores:.2f} cores",
        ]
        for one in found.rests
    ]
    figures = {**asdict(found), "growth": {**asdict(growth), "most_starting": growth.most_starting}}
    return Page(
        title=f"A controller with {growth.replicas} replicas",
        run=facts,
        lines=list(lines(found)),
        tables=[
            Table(f"From 0 to {growth.replicas}", ["", ""], rows),
            Table(
                "At rest",
                ["replicas", "controller's CPU", "its memory", "ticks", "everything else"],
                at_rest,
            ),
        ],
        how=HOW,
        figures=figures,
    )


HOW = f"""\
- A stack of its own, HAProxy, controller and Prometheus included; the service is tests/bench/apps/tiny.yaml unless the
  command says otherwise.
- Ticks are the controller's own histogram (`{TICKS}`: look at engine and HAProxy, plan,
  publication). A tick waits {1000 * PATIENCE_S:.0f} ms at most for the engine and HAProxy, not at all
  where the last answer took longer, and continues with the former reading. How long they took to
  answer is `{READINGS}` and `{HAPROXY_READINGS}`. CPU and resident memory are those of the controller's process
  in /proc.
- How long the controller's event loop waited for a core is the kernel's schedstat of its thread.
- When a container was made and started is the engine's word, when a replica takes traffic the controller's event of its
  server in HAProxy. The engine gets at most {PARALLEL_ACTIONS} calls at a time (`PARALLEL_ACTIONS`).
- At rest: from {SETTLE_S:g} s after the last change on.
"""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--then", type=int, default=50, help="scaled down to so many afterwards")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it is watched at rest; 0 = it is not")
    parser.add_argument("--app", default="tests/bench/apps/tiny.yaml")
    parser.add_argument("--service", default="tiny")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    stack = Stack(PROJECT, [options.app])
    command = f"python -m tests.bench.many_containers --replicas {options.replicas} --then {options.then}"
    if options.service != "tiny":
        command += f" --app {options.app} --service {options.service}"
    facts = run_facts(command, docker=stack.docker.version()["Version"])
    stack.down()
    try:
        found = run(stack, options.service, options.replicas, options.then, options.seconds)
    finally:
        stack.down()
    directory = options.out or directory_of(facts, f"{options.replicas}-replicas-{options.service}")
    page(found, facts).write(directory)
    for line in lines(found):
        print(f"{line.what}: {line.wanted or 'no promise'}; found {line.found}")
    print(f"\nFigures: {directory}")


if __name__ == "__main__":
    main()
