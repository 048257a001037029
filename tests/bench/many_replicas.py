"""What a controller costs with many replicas: `python -m tests.bench.many_replicas 50 200 500`.

The whole controller on an engine and a HAProxy in memory, in real time: starts so many replicas of one routed service,
waits until all take traffic, then watches itself at rest. Prints how long convergence took beyond a replica's own
start, ticks (median, 99th percentile, longest, in milliseconds of CPU time) and the share of a core at rest. Replicas
answer their probes from memory, so HTTP and Docker are not in the figures: `python -m tests.bench.many_containers` has
those. `--profile FILE` keeps where the time at rest goes, for `python -m pstats FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from controller.model.spec import ProbeSpec, ServiceSpec
from controller.observe.probe import Reading, Subject
from tests.fakes.fake_engine import Behaviour
from tests.unit.controller.control import Control, until

START_S = 2.0
"""How long each replica takes until it is ready."""
LIMIT_S = 300.0


class Many(Control):
    """A controller on fakes whose replicas cost next to nothing, however many they are, and have nothing to do."""

    async def ask(self, subject: Subject) -> Reading:
        """Answer a probe the way an idle replica would."""
        await asyncio.sleep(0)
        one = self.engine.containers.get(subject.container_id)
        if one is None or one.started_at is None or not one.state.is_up:
            return Reading(ok=False, detail="no answer from :9100/readyz within 2 s")
        if self.engine.clock() < one.started_at + START_S:
            return Reading(ok=False, detail="503 from :9100/readyz: loading", ongoing=0, queued=0)
        return Reading(ok=True, detail="200 from :9100/readyz", ongoing=0, queued=0, answered=0, errors=0)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replicas", type=int, nargs="*", default=[50, 200])
    parser.add_argument("--rest-s", type=float, default=20.0, help="how long it is watched at rest")
    parser.add_argument("--profile", type=Path, help="where the profile of the last one's rest is written")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for replicas in options.replicas:
        with tempfile.TemporaryDirectory(prefix="pierhead-bench-") as directory:
            asyncio.run(measure(Path(directory), replicas, options.rest_s, options.profile))


async def measure(directory: Path, replicas: int, rest_s: float, profile: Path | None = None) -> None:
    """Start, converge, rest; print one line each."""
    spec = ServiceSpec(
        name="tiny",
        image="image/tiny",
        protocol="http",
        port=8080,
        replicas=replicas,
        probe=ProbeSpec(port=9100, path="/readyz"),
        route="/tiny",
        has_build=True,
        definition_hash="d1",
    )
    control = Many.of(directory, spec)
    control.engine.behaviours["tiny"] = Behaviour(ready_after_s=START_S)
    async with control.running() as controller:
        ticks: list[float] = []
        controller.loop.tick = timed(controller.loop.tick, ticks)  # type: ignore[method-assign]
        begun = time.monotonic()
        await until(lambda: len(control.router.ready("tiny")) == replicas, LIMIT_S)
        await control.settled("tiny", replicas, LIMIT_S)
        took_s = time.monotonic() - begun
        print(
            f"{replicas} replicas took traffic {took_s - START_S:.1f} s later than one alone can (after {took_s:.1f} s)"
        )
        print(told("while they started", ticks))
        await asyncio.sleep(2.0)  # the first batch is watched for a while: that is not rest yet
        ticks.clear()
        profiler = cProfile.Profile()
        if profile is not None:
            profiler.enable()
        cpu = time.process_time()
        await asyncio.sleep(rest_s)
        share = (time.process_time() - cpu) / rest_s
        profiler.disable()
        if profile is not None:
            profiler.dump_stats(profile)
        print(f"{told('at rest', ticks)}; {100 * share:.1f} % of a core")


def timed(
    tick: Callable[..., Coroutine[Any, Any, float]], ticks: list[float]
) -> Callable[..., Coroutine[Any, Any, float]]:
    """Note the CPU time of each tick; what else the event loop does meanwhile (probes, actions) is in it."""

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
