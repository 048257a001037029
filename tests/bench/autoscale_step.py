"""A load step and a steady noisy load on a real stack: `python -m tests.bench.autoscale_step --seconds 240`.

Takes up a stack of its own with the service of tests/e2e/apps/sleeper.yaml, sends it requests at random times
(Poisson), first few, then ten times as many, and notes target, ready replicas and latencies. The simulator runs the
same arrivals with the same block. Writes both as figures and pictures to tests/bench/results, and removes everything.
The images must have been built (`make build`); `PIERHEAD_TAG` says which.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from controller.daemon.loop import LOOK_S
from controller.model.spec import AutoscaleSpec, ProbeSpec, ServiceSpec
from simulator.distributions import parse_distribution
from simulator.plot import draw
from simulator.report import Summary, summarise
from simulator.simulation import Happened, Result, Sample, Setting, seeded, simulate
from simulator.traces import Trace, read_trace
from simulator.world import Requests
from tests.bench.load.generator import OpenLoop, Record
from tests.bench.many_containers import Events, Start, starts_of
from tests.bench.record import Page, Table, directory_of, run_facts
from tests.bench.targets import Line
from tests.harness.stack import ROOT, Stack
from tests.harness.waiting import eventually

PROJECT = "pierhead-bench-steps"
APP = "tests/e2e/apps/sleeper.yaml"
SERVICE = "sleeper"
LOOK_EVERY_S = 0.5
MAX_CONNECTIONS = 512
DRAIN_S = 5.0
STEP_AT_S, FACTOR = 20.0, 10
RATE = 14.4
"""Before the step, a second. Ten times as many keep 36 requests in work: four and a half replicas' worth, the middle of
what five are for, so that chance alone asks for no other number."""


@dataclass
class Seen(Record):
    """Keeps each request, in seconds since the beginning."""

    begun: float = 0.0
    kept: Requests = field(default_factory=Requests)

    def answer(self, due: float, first: float, now: float, status: int, body_bytes: int) -> None:
        """One complete answer."""
        super().answer(due, first, now, status, body_bytes)
        if status == 200:
            self.kept.finished_at.append(now - self.begun)
            self.kept.latency.append(now - due)
        else:
            self.kept.refused_at.append(now - self.begun)

    def failure(self, due: float, now: float, why: str) -> None:
        """A request without an answer."""
        super().failure(due, now, why)
        self.kept.lost += 1


async def send(url: str, trace: Trace, begun: float) -> Seen:
    """Send each request when it is due, whatever became of the others. `begun` is of time.monotonic()."""
    load = OpenLoop(url, seen := Seen(record_from=0.0, begun=begun), MAX_CONNECTIONS)
    for at in trace.times:
        due = begun + at
        await asyncio.sleep(due - time.monotonic())
        seen.kept.arrived.append(at)
        load.arrive(due, time.monotonic())
    deadline = time.monotonic() + DRAIN_S
    while not load.is_drained and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing is measured any more
        await asyncio.sleep(0.05)
    await load.close("no answer")
    return seen


async def watch(stack: Stack, begun: float, end_s: float) -> list[Sample]:
    """Look at the service's status until `end_s` seconds after `begun`."""
    samples = []
    while (now := time.monotonic() - begun) < end_s:
        row = await asyncio.to_thread(stack.service, SERVICE)
        in_work = sum(replica["ongoing"] or 0 for replica in row["replicas"])
        present = sum(bool(replica["name"]) for replica in row["replicas"])
        samples.append(Sample(now, row["autoscale"]["wanted"], row["wanted"], row["ready"], present, in_work, 0))
        await asyncio.sleep(LOOK_EVERY_S)
    return samples


def autoscale_of(file: Path) -> AutoscaleSpec:
    """The block that the stack runs with."""
    return AutoscaleSpec(**yaml.safe_load(file.read_text())["services"][SERVICE]["x-serve"]["autoscale"])


def decisions(events: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """The autoscaler's, each (from, to)."""
    told = [re.search(r"(\d+) -> (\d+) replicas", event["message"]) for event in events]
    return [(int(found[1]), int(found[2])) for found in told if found]


@dataclass(frozen=True)
class Found:
    """What a run found: the stack's side in the simulator's own terms."""

    result: Result
    summary: Summary
    starts: Sequence[Start]
    after_settling: Sequence[tuple[int, int]]
    """Decisions after the replicas that the step needs were ready."""
    settled_for_s: float

    @property
    def slowest_s(self) -> float:
        """The longest time from the making of a container until it takes traffic."""
        return max(start.serving_s - start.created_s for start in self.starts)


def measure(stack: Stack, trace: Trace, autoscale: AutoscaleSpec) -> Found:
    """Send the load to a stack that is up and has one replica."""
    events = Events(stack)
    events.start()
    wall, begun = time.time(), time.monotonic()

    async def both() -> tuple[Seen, list[Sample]]:
        return await asyncio.gather(send(stack.url("/sleeper"), trace, begun), watch(stack, begun, trace.duration_s))

    seen, samples = asyncio.run(both())
    events.end()
    starts = starts_of(stack, SERVICE, events, wall)
    spec = ServiceSpec(
        SERVICE, "", "http", 8080, autoscale.min, ProbeSpec(9100, "/readyz"), route="/sleeper", autoscale=autoscale
    )
    work_s = float(yaml.safe_load((ROOT / APP).read_text())["services"][SERVICE]["environment"]["WORK_S"])
    own = sorted(start.serving_s - start.created_s for start in starts)
    setting = Setting(
        service_time=parse_distribution("service_time", f"{work_s:g}"),
        start_time=parse_distribution("start_time", f"{own[len(own) // 2]:.1f}" if own else "3"),
    )
    told = [Happened(event["at"] - wall, event["kind"], event["message"]) for event in events.found]
    seen.kept.needs = array("d", [work_s] * len(seen.kept.arrived))
    seen.kept.waited = array("d", [max(latency - work_s, 0.0) for latency in seen.kept.latency])
    result = Result(spec, autoscale, trace, setting, tuple(samples), tuple(told), seen.kept, len(starts), 0)
    summary = summarise(result)
    ready_s = summary.steps[0].ready_after_s
    settled_s = trace.steps[0].at_s + ready_s if ready_s is not None else trace.duration_s
    later = decisions(events.of("autoscale", wall + settled_s))
    return Found(result, summary, starts, later, trace.duration_s - settled_s)


def lines(found: Found) -> list[Line]:
    """The promises."""
    step, autoscale = found.summary.steps[0], found.result.autoscale
    limit_s = autoscale.upscale_delay_s + found.slowest_s + LOOK_S
    failed = found.summary.refused + found.summary.lost
    return [
        Line(
            f"load x {FACTOR}: {step.needed} replicas are wanted",
            f"within upscale_delay_s ({autoscale.upscale_delay_s:g} s)",
            _after(step.decided_after_s),
            step.decided_after_s is not None and step.decided_after_s <= autoscale.upscale_delay_s + LOOK_S,
        ),
        Line(
            f"load x {FACTOR}: {step.needed} replicas take traffic",
            f"within upscale_delay_s + the slowest start ({found.slowest_s:.1f} s) + a look ({LOOK_S:g} s)",
            _after(step.ready_after_s),
            step.ready_after_s is not None and step.ready_after_s <= limit_s,
        ),
        Line(
            f"decisions in the {found.settled_for_s:.0f} s of steady noisy load after that",
            "none or one",
            f"{len(found.after_settling)}"
            + "".join(f", {before} -> {after}" for before, after in found.after_settling),
            len(found.after_settling) <= 1,
        ),
        Line("requests that failed", "none", f"{failed} of {found.summary.requests:,}", not failed),
    ]


def _after(seconds: float | None) -> str:
    return "never" if seconds is None else f"after {seconds:.1f} s"


def page(found: Found, simulated: Summary, facts: Mapping[str, Any]) -> Page:
    """What people read."""
    both = (found.summary, simulated)
    rows = [
        ["target decided after", *(_after(each.steps[0].decided_after_s) for each in both)],
        ["ready after", *(_after(each.steps[0].ready_after_s) for each in both)],
        ["target: first, most, last", *(f"{e.target_first}, {e.target_most}, {e.target_last}" for e in both)],
        ["target changes, of them back", *(f"{each.target_changes}, {each.reversals}" for each in both)],
        ["latency p50, p99, max", *(_latency(each) for each in both)],
        ["requests, failed", *(f"{each.requests:,}, {each.refused + each.lost:,}" for each in both)],
    ]
    block = ", ".join(f"{name}: {value:g}" for name, value in _block(found.result.autoscale).items())
    return Page(
        title=f"Ten times the load, and {found.settled_for_s / 60:.0f} minutes of noise",
        run=facts,
        lines=lines(found),
        tables=[
            Table(
                "The stack and the simulator",
                ["", "stack", "simulator"],
                rows,
                f"`{{{block}}}`; {RATE:g}, then {FACTOR * RATE:g} requests a second, 0.25 s each.",
            )
        ],
        pictures=["stack.png", "simulator.png"],
        how=HOW,
        figures={
            "stack": asdict(found.summary),
            "simulator": asdict(simulated),
            "starts": [asdict(start) for start in found.starts],
            "after_settling": found.after_settling,
            "samples": [asdict(sample) for sample in found.result.samples],
            "decisions": [asdict(event) for event in found.result.events if event.kind == "autoscale"],
        },
    )


def _block(autoscale: AutoscaleSpec) -> dict[str, float]:
    return {
        name: value
        for name, value in asdict(autoscale).items()
        if isinstance(value, int | float) and value != getattr(AutoscaleSpec(), name)
    }


def _latency(summary: Summary) -> str:
    spread = summary.latency_s
    return ", ".join(
        "-" if value is None else f"{1000 * value:.0f} ms" for value in (spread.p50, spread.p99, spread.most)
    )


HOW = """\
- A stack of its own, HAProxy, controller and Prometheus included. The arrivals are a Poisson process with a fixed seed,
  sent when they are due whatever became of the others; latency counts from then.
- Target and ready replicas are the API's, twice a second. A start is the time from the making of a container until
  HAProxy sends to it. The simulator gets the same arrivals, the same block and the median start.
"""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="how long the high load lasts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = f"step:{FACTOR}x,rate={RATE:g},at={STEP_AT_S:g},duration={STEP_AT_S + options.seconds:g}"
    trace = read_trace(shape, seeded(options.seed, "arrivals"))
    autoscale = autoscale_of(ROOT / APP)
    stack = Stack(PROJECT, [APP])
    command = f"python -m tests.bench.autoscale_step --seconds {options.seconds:g} --seed {options.seed}"
    facts = run_facts(command, docker=stack.docker.version()["Version"])
    stack.down()
    try:
        stack.up()
        eventually(lambda: stack.get("/sleeper").status == 200, "the service answers", 120)
        stack.wait_settled(**{SERVICE: 1})
        found = measure(stack, trace, autoscale)
    finally:
        stack.down()
    directory = options.out or directory_of(facts, "autoscale-step")
    directory.mkdir(parents=True, exist_ok=True)
    simulation = simulate(found.result.spec, trace, found.result.setting)
    simulated = summarise(simulation)
    for result, summary, name in ((found.result, found.summary, "stack"), (simulation, simulated, "simulator")):
        named = replace(result, spec=replace(result.spec, name=f"{SERVICE}, {name}"))
        draw(named, summary, directory / f"{name}.png")
    page(found, simulated, facts).write(directory)
    for line in lines(found):
        print(f"{line.what}: {line.wanted}; found {line.found}")
    print(f"\nFigures and pictures: {directory}")


if __name__ == "__main__":
    main()
