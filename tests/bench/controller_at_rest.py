"""The controller's cost when nothing happens: `python -m tests.bench.controller_at_rest --replicas 20 --seconds 60`.

Starts a stack of its own with that many small replicas, lets it come to rest, and reads the CPU time and the resident
memory of the controller's process from /proc. Prints one line of JSON; the images must have been built (`make build`).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.harness.stack import Stack
from tests.harness.waiting import eventually

SETTLE_S = 15.0
"""Start-up work (first probes, caches, imports) is not rest."""


@dataclass(frozen=True)
class Cost:
    """Share of one core in percent, memory in MB of 10^6 bytes."""

    replicas: int
    seconds: float
    cpu_percent_of_one_core: float
    resident_mb: float


def measure(stack: Stack, replicas: int, seconds: float) -> Cost:
    """Return the cost of the controller of a stack that is at rest."""
    pid = int(stack.container("controller").attrs["State"]["Pid"])
    before, started = cpu_s(pid), time.monotonic()
    time.sleep(seconds)  # measures; waits for nothing
    elapsed = time.monotonic() - started
    cpu_percent = 100 * (cpu_s(pid) - before) / elapsed
    return Cost(replicas, round(elapsed, 1), round(cpu_percent, 2), round(_resident_bytes(pid) / 1e6, 1))


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, its threads and the children it has waited for (proc(5), fields 14 to 17 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    stack = Stack("pierhead-test-rest", ["compose/apps/echo.yaml"])
    stack.down()
    try:
        stack.up()
        eventually(lambda: stack.get("/echo?message=hi").status == 200, "echo answers")
        stack.scale("echo-child", arguments.replicas - 1)
        time.sleep(SETTLE_S)
        print(json.dumps(asdict(measure(stack, arguments.replicas, arguments.seconds))))
    finally:
        stack.down()


if __name__ == "__main__":
    main()
