"""What a controller costs with many replicas: `python -m tests.bench.many_replicas --replicas 200`.

The whole controller on an engine and a HAProxy in memory, in real time: starts so many replicas of one routed service,
waits until all take traffic, then watches itself at rest. Prints how long convergence took beyond a replica's own
start, ticks (median, 99th percentile, longest, in milliseconds of CPU time), CPU and memory. Replicas answer their
probes from memory, so the share of HTTP is not in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from controller.model import ProbeSpec, ServiceSpec
from tests.fakes.fake_engine import Behaviour
from tests.unit.controller.control import Control, until

START_S = 2.0
"""How long each replica takes until it is ready."""


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--rest-s", type=float, default=20.0, help="how long it is watched at rest")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="pierhead-bench-") as directory:
        asyncio.run(measure(Path(directory), options.replicas, options.rest_s))


async def measure(directory: Path, replicas: int, rest_s: float) -> None:
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
    control = Control.of(directory, spec)
    control.engine.behaviours["tiny"] = Behaviour(ready_after_s=START_S)
    async with control.running() as loop:
        ticks: list[float] = []
        loop.tick = timed(loop.tick, ticks)  # type: ignore[method-assign]
        begun = time.monotonic()
        await until(lambda: len(control.router.ready("tiny")) == replicas, within_s=300)
        await control.settled("tiny", replicas, within_s=60)
        took_s = time.monotonic() - begun
        beyond_s = took_s - START_S
        print(f"{replicas} replicas, all ready after {took_s:.1f} s ({beyond_s:.1f} s beyond a replica's own start)")
        told("while they started", ticks)
        ticks.clear()
        cpu = time.process_time()
        await asyncio.sleep(rest_s)
        share = (time.process_time() - cpu) / rest_s
        told("at rest", ticks)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"at rest: {100 * share:.1f} % of a core; {peak_mb:.0f} MB at most, the fakes' included")


def timed(
    tick: Callable[[], Coroutine[Any, Any, float]], ticks: list[float]
) -> Callable[[], Coroutine[Any, Any, float]]:
    """Note the CPU time of each tick."""

    async def measured() -> float:
        begun = time.process_time()
        try:
            return await tick()
        finally:
            ticks.append(1000 * (time.process_time() - begun))

    return measured


def told(when: str, ticks: list[float]) -> None:
    """Print one line of figures."""
    if len(ticks) < 2:
        print(f"{when}: {len(ticks)} ticks")
        return
    percentiles = statistics.quantiles(ticks, n=100)
    median, most = statistics.median(ticks), max(ticks)
    print(f"{when}: {len(ticks)} ticks, median {median:.1f} ms, p99 {percentiles[98]:.1f} ms, longest {most:.1f} ms")


if __name__ == "__main__":
    main()
