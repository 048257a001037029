"""The controller on a Swarm of five nodes with 60 replicas: `python -m tests.bench.controller_on_nodes --seconds 60`.

Starts the tests' Swarm with a stack of its own, scales a tiny service to so many replicas, and watches the controller
that acts while they start and at rest: its histogram of ticks, and CPU time and resident memory of its process. `--out
DIRECTORY` writes a page. The images must have been built (`make build`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.many_containers import READINGS, TickBook, Ticks
from tests.bench.record import Page, Table, run_facts
from tests.bench.targets import Line
from tests.harness.haproxy_container import docker
from tests.harness.place import TAG
from tests.harness.stack import Answer
from tests.harness.swarm_rig import SwarmRig
from tests.harness.swarm_stack import NAMES, SwarmStack
from tests.harness.waiting import eventually

FILES = "compose/compose.yaml:tests/bench/apps/tiny.yaml"
SERVICE = "tiny"
SETTLE_S = 30.0
"""Start-up work (first probes, a new replica's watch) is not rest."""
TICK_S, CPU_PERCENT, MEMORY_MB = 0.1, 5.0, 150.0
"""What is promised of 60 replicas on five nodes."""
METRICS = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1]).read().decode())"


class Acting:
    """The controller that acts, as its node's engine and the node's /proc show it."""

    def __init__(self, stack: SwarmStack) -> None:
        self.node, self.container = stack.acting_container()
        self._pid = self.node.cli("inspect", "--format", "{{.State.Pid}}", self.container)

    def api(self, path: str) -> Answer:
        """What its API answers inside its container."""
        told = self.node.cli("exec", self.container, "python", "-c", METRICS, f"http://127.0.0.1:8100{path}")
        return Answer(200, {}, told.encode())

    def cpu_s(self) -> float:
        """CPU seconds so far of its process and of its threads (proc(5), fields 14 and 15 of stat)."""
        fields = self._proc("stat").rpartition(")")[2].split()
        return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")

    def resident_mb(self) -> float:
        """Resident memory in MB of 10^6 bytes."""
        return int(self._proc("statm").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def _proc(self, name: str) -> str:
        return docker("exec", self.node.container, "cat", f"/proc/{self._pid}/{name}")


@dataclass(frozen=True)
class Span:
    """The controller over some time."""

    what: str
    seconds: float
    cpu_percent: float
    """Of one core."""
    resident_mb: float
    ticks: Ticks
    readings: Ticks
    """Of the engine: a manager's lists."""


class Watch:
    """From its making to `span`."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._ticks, self._readings = TickBook(acting, within_s=TICK_S), TickBook(acting, READINGS, within_s=TICK_S)
        self._cpu_s, self._began = acting.cpu_s(), time.monotonic()

    def span(self, what: str) -> Span:
        """What was seen."""
        seconds, cpu_s = time.monotonic() - self._began, self._acting.cpu_s() - self._cpu_s
        memory, percent = round(self._acting.resident_mb(), 1), round(100 * cpu_s / seconds, 2)
        return Span(what, round(seconds, 1), percent, memory, self._ticks.lap(), self._readings.lap())


def measure(stack: SwarmStack, replicas: int, seconds: float) -> list[Span]:
    """While they start, and at rest."""
    acting = Acting(stack)
    starting = Watch(acting)
    stack.make("scale", SERVICE, str(replicas), "--timeout", "600")
    spans = [starting.span(f"0 to {replicas} replicas")]
    stack.settle()
    time.sleep(SETTLE_S)  # rest begins later
    resting = Watch(acting)
    time.sleep(seconds)  # measures; waits for nothing
    spans.append(resting.span(f"{replicas} replicas at rest"))
    assert stack.acting_container() == (acting.node, acting.container), "another controller acts now"
    return spans


def lines(spans: Sequence[Span]) -> Iterator[Line]:
    """The promises."""
    for one in spans:
        found = f"{100 * one.ticks.within:.1f} % of {one.ticks.count}; mean {1000 * one.ticks.mean_s:.0f} ms"
        yield Line(f"a tick, {one.what}", f"< {1000 * TICK_S:.0f} ms", found, one.ticks.within == 1.0)
    rest = spans[-1]
    found = f"{rest.cpu_percent:.1f} %"
    yield Line(f"CPU, {rest.what}", f"< {CPU_PERCENT:g} % of a core", found, rest.cpu_percent < CPU_PERCENT)
    most = max(one.resident_mb for one in spans)
    yield Line("memory", f"< {MEMORY_MB:g} MB", f"{most:.0f} MB", most < MEMORY_MB)


def page(spans: Sequence[Span], nodes: int, replicas: int, facts: Mapping[str, Any]) -> Page:
    """What people read."""
    within = f"within {1000 * TICK_S:.0f} ms"
    head = ["", "CPU of one core", "memory", "ticks", "mean", within, "longest", "manager read in"]
    rows = [
        [
            one.what,
            f"{one.cpu_percent:.1f} %",
            f"{one.resident_mb:.0f} MB",
            str(one.ticks.count),
            f"{1000 * one.ticks.mean_s:.0f} ms",
            f"{100 * one.ticks.within:.1f} %",
            f"<= {1000 * one.ticks.longest_s:.0f} ms",
            f"{1000 * one.readings.mean_s:.0f} ms",
        ]
        for one in spans
    ]
    return Page(
        title=f"The controller on a Swarm of {nodes} nodes with {replicas} replicas",
        run=facts,
        lines=list(lines(spans)),
        tables=[Table("The controller that acts", head, rows)],
        how=HOW,
        figures={"spans": [asdict(one) for one in spans]},
    )


HOW = """\
- Nodes are Docker Engines in privileged containers that share one machine, three of them managers, each with a
  controller; the figures are those of the controller that acts. The service is tests/bench/apps/tiny.yaml.
- CPU time and resident memory are those of its process in /proc; ticks and readings are its own histograms.
"""


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it is watched at rest")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = f"python -m tests.bench.controller_on_nodes --replicas {options.replicas} --seconds {options.seconds:g}"
    SwarmStack.build()
    images = [f"pierhead/{name}:{TAG}" for name in (*NAMES, "haproxy")]
    with SwarmRig(nodes=options.nodes, managers=min(3, options.nodes)).running([], only_first=images) as rig:
        facts = run_facts(command, docker=rig.nodes[0].cli("version", "--format", "{{.Server.Version}}"))
        stack = SwarmStack(rig, "bench", FILES)
        stack.make("up")
        eventually(stack.is_quiet, "nothing is to do", every_s=1.0)
        spans = measure(stack, options.replicas, options.seconds)
    for line in lines(spans):
        print(f"{line.what}: {line.wanted}; found {line.found}")
    if options.out:
        page(spans, options.nodes, options.replicas, facts).write(options.out)
    return 0 if all(line.met for line in lines(spans)) else 1


if __name__ == "__main__":
    sys.exit(main())
