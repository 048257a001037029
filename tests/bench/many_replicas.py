"""What a controller costs with many replicas: `python -m tests.bench.many_replicas 50 200 500`.

The whole controller on an engine and a HAProxy in memory, in real time: starts so many replicas of one routed service,
waits until all take traffic, then watches itself at rest. Prints how long convergence took beyond a replica's own
start, ticks (median, 99th percentile, longest, in milliseconds of CPU time) and the share of a core at rest. Replicas
answer their probes from memory, so HTTP and Docker are not in the figures: `python -m tests.bench.many_containers` has
those. `--profile FILE` keeps where the time at rest goes, for `python -m pstats FILE`.

With `--nodes N` the engine is a Swarm (`many_nodes.py`): the real reader of a manager's lists and the real router of an
edge on each node, with the lists and the edges' answers in memory. A third of the replicas have a GPU then.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import logging
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from controller.model.spec import GpuRequest, ProbeSpec, ServiceSpec
from controller.observe.judge import ProbeReading
from controller.observe.prober import Subject
from tests.bench.many_nodes import Edges, ListedSwarm, ManyEdges
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.fakes.fake_router import FakeRouter
from tests.fakes.fake_swarm_engine import FakeSwarmEngine
from tests.harness.virtual_time import wall_clock
from tests.unit.controller.control import Control, until

START_S = 2.0
"""How long each replica takes until it is ready."""
LIMIT_S = 300.0


@dataclass
class Many(Control):
    """A controller on fakes whose replicas cost next to nothing, however many they are, and have nothing to do."""

    calls: Counter[str] = field(default_factory=Counter)
    """On nodes: what was asked of the manager and of edges, and bytes of the manager's answers."""

    async def ask(self, subject: Subject) -> ProbeReading:
        """Answer a probe the way an idle replica would."""
        await asyncio.sleep(0)
        one = self.engine.containers.get(subject.container_id)
        if one is None or one.started_at is None or not one.state.is_up:
            return ProbeReading(ok=False, detail="no answer from :9100/readyz within 2 s")
        if self.engine.clock() < one.started_at + START_S:
            return ProbeReading(ok=False, detail="503 from :9100/readyz: loading", ongoing=0, queued=0)
        return ProbeReading(ok=True, detail="200 from :9100/readyz", ongoing=0, queued=0, answered=0, errors=0)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replicas", type=int, nargs="*", default=[50, 200])
    parser.add_argument("--nodes", type=int, default=0, help="on a Swarm of so many")
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--rest-s", type=float, default=20.0, help="how long it is watched at rest")
    parser.add_argument("--profile", type=Path, help="where the profile of the last one's rest is written")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for replicas in options.replicas:
        with tempfile.TemporaryDirectory(prefix="pierhead-bench-") as directory:
            asyncio.run(measure(many(Path(directory), replicas, options.nodes, options.gpus), options))


def many(directory: Path, replicas: int, nodes: int = 0, gpus: int = 0, kind: type[Many] = Many) -> Many:
    """So many replicas of a routed service; on nodes, a third of them of one that has a GPU for each."""
    on_gpus = min(replicas // 3, nodes * gpus)
    image = "registry.example:5000/tiny@sha256:" + 64 * "a" if nodes else "image/tiny"
    container = {"Image": image, "Env": [f"PIERHEAD_SETTING_{number}=some value" for number in range(12)]}
    tiny = ServiceSpec(
        name="tiny",
        image=image,
        protocol="http",
        port=8080,
        replicas=replicas - on_gpus,
        probe=ProbeSpec(port=9100, path="/readyz"),
        route="/tiny",
        has_build=True,
        definition_hash="d1",
        container=container,
    )
    specs = [tiny]
    if on_gpus:
        specs.append(replace(tiny, name="large", route="/large", replicas=on_gpus, gpu=GpuRequest(1)))
    if not nodes:
        return kind.of(directory, *specs)
    swarm = FakeSwarmEngine(wall_clock)
    for number in range(1, nodes + 1):
        swarm.add_node(f"n{number:02}", gpus, is_manager=number <= 3)
    control = Many.of(directory, *specs, engine=swarm)
    control.engine = cast(FakeEngine, ListedSwarm(swarm, control.calls))
    control.router = cast(FakeRouter, ManyEdges(Edges(list(swarm.nodes), control.calls)))
    return control


async def measure(control: Many, options: argparse.Namespace) -> None:
    """Start, converge, rest; print a line each."""
    wanted = {name: spec.replicas for name, spec in control.source.services.items()}
    for name in wanted:
        control.engine.behaviours[name] = Behaviour(ready_after_s=START_S)
    async with control.running() as controller:
        ticks: list[float] = []
        controller.loop.tick = timed(controller.loop.tick, ticks)  # type: ignore[method-assign]
        begun = time.monotonic()
        await until(lambda: all(len(control.router.ready(name)) == wanted[name] for name in wanted), LIMIT_S)
        for name, replicas in wanted.items():
            await control.settled(name, replicas, LIMIT_S)
        took_s = time.monotonic() - begun
        late_s = took_s - START_S
        print(f"{sum(wanted.values())} replicas took traffic {late_s:.1f} s later than one alone can")
        print(told("while they started", ticks))
        await asyncio.sleep(2.0)  # the first batch is watched for a while: that is not rest yet
        ticks.clear()
        control.calls.clear()
        profiler = cProfile.Profile()
        if options.profile is not None:
            profiler.enable()
        cpu = time.process_time()
        await asyncio.sleep(options.rest_s)
        share = (time.process_time() - cpu) / options.rest_s
        profiler.disable()
        if options.profile is not None:
            profiler.dump_stats(options.profile)
        print(f"{told('at rest', ticks)}; {100 * share:.1f} % of a core; {resident_mb():.0f} MB with the fakes")
        if control.calls:
            each = {name: count / options.rest_s for name, count in sorted(control.calls.items())}
            print("each second at rest: " + ", ".join(f"{name} {count:.1f}" for name, count in each.items()))
    await control.engine.close()


def resident_mb() -> float:
    """Resident memory of this process, in MB of 10^6 bytes: the controller, and the texts and fakes that it reads."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def timed(
    tick: Callable[..., Coroutine[Any, Any, float]], ticks: list[float]
) -> Callable[..., Coroutine[Any, Any, float]]:
    """Note the CPU time of each tick; what else the event loop does during it (probes, actions) is in it."""

    async def measured(*, thorough: bool = False) -> float:
        begun = time.process_time()
        try:
            return await tick(thorough=thorough)
        finally:
            ticks.append(1000 * (time.process_time() - begun))

    return measured


def told(when: str, ticks: Sequence[float]) -> str:
    """One line of figures."""
    if len(ticks) < 2:
        return f"{when}: {len(ticks)} ticks"
    percentiles = statistics.quantiles(ticks, n=100, method="inclusive")
    median, most = statistics.median(ticks), max(ticks)
    return f"{when}: {len(ticks)} ticks, median {median:.1f} ms, p99 {percentiles[98]:.1f} ms, longest {most:.1f} ms"


if __name__ == "__main__":
    main()
