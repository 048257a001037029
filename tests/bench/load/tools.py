"""Calls the load generators and reads what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.processes import ROOT, BenchError

LUA = Path(__file__).with_name("wrk.lua")
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
NO_HEADERS: Mapping[str, str] = {}
SLACK_S = 60.0
"""A generator that takes this much longer than its load is killed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a generator saw. `worked_on` counts also the requests of a warm-up in the same process."""

    requests: int
    seconds: float
    worked_on: int
    errors: Mapping[str, int] = field(default_factory=dict)
    latency_ms: Mapping[str, float] = field(default_factory=dict)
    first_ms: Mapping[str, float] = field(default_factory=dict)
    histogram: str = ""
    lag_p99_ms: float = 0.0
    bytes_each: float = 0.0
    """Mean size of an answer, headers included where wrk counts."""


def wrk(
    url: str, connections: int, seconds: float, there: Sequence[str] = (), headers: Mapping[str, str] = NO_HEADERS
) -> Outcome:
    """Closed loop. Latencies are wrk's own: it fills in for answers that took more than twice the mean interval.

    `there`: a command that runs it in another place.
    """
    users = ["--", "users"] if "{user_id}" in url else []
    whole = max(1, round(seconds))  # wrk takes no fractions
    command = [*there, "wrk", "-t1", f"-c{connections}", f"-d{whole}s", "--timeout", "30s", "-s", str(LUA)]
    command += [f"-H{name}: {value}" for name, value in headers.items()] + [url, *users]
    said = _json_line(_run(command, seconds))
    errors = {name: count for name, count in said["errors"].items() if count}
    return Outcome(
        requests=said["requests"],
        seconds=said["seconds"],
        worked_on=said["requests"],
        errors=errors,
        latency_ms={
            "p50": said["p50_ms"],
            "p90": said["p90_ms"],
            "p99": said["p99_ms"],
            "p99.9": said["p999_ms"],
            "max": said["max_ms"],
        },
        bytes_each=said["bytes"] / max(1, said["requests"]),
    )


def open_loop(python: Path, url: str, rate: float, seconds: float, warm_seconds: float) -> Outcome:
    """Constant arrival rate; see generator.py."""
    return _own(python, url, ["--rate", f"{rate:.3f}"], seconds, warm_seconds)


def closed_loop(python: Path, url: str, connections: int, seconds: float, warm_seconds: float) -> Outcome:
    """Our generator's closed loop, for the time to the first byte."""
    return _own(python, url, ["--connections", str(connections)], seconds, warm_seconds)


def _own(python: Path, url: str, how: Sequence[str], seconds: float, warm_seconds: float) -> Outcome:
    command = [str(python), "-m", "tests.bench.load.generator", url, *how]
    command += ["--seconds", f"{seconds:.2f}", "--warm-seconds", f"{warm_seconds:.2f}"]
    said = _json_line(_run(command, seconds))
    return Outcome(
        requests=said["requests"],
        seconds=said["seconds"],
        worked_on=said["answered_with_warm_up"],
        errors=said["errors"],
        latency_ms=percentiles_ms(said["latency"]),
        first_ms=percentiles_ms(said["first_byte"]),
        histogram=said["latency"],
        lag_p99_ms=said["lag_p99_ms"],
        bytes_each=said["bytes"] / max(1, said["requests"]),
    )


def percentiles_ms(*encoded: str) -> dict[str, float]:
    """Percentiles of encoded histograms, merged: exact for all of them together, no average of percentiles."""
    from hdrh.histogram import HdrHistogram  # the report is tested without it

    merged = HdrHistogram.decode(encoded[0].encode())
    for other in encoded[1:]:
        merged.add(HdrHistogram.decode(other.encode()))
    return {name: merged.get_value_at_percentile(share) / 1e3 for name, share in PERCENTILES.items()}


def model_alone(python: Path, threads: int, seconds: float, device: str) -> Outcome:
    """The DLRM's scorer without serving; see bare/model_alone.py."""
    command = [str(python), "-m", "tests.bench.bare.model_alone", "--threads", str(threads), "--device", device]
    said = _json_line(_run([*command, "--seconds", f"{seconds:.2f}"], seconds))
    return Outcome(said["requests"], said["seconds"], said["requests"])


def _run(command: Sequence[str], seconds: float) -> str:
    """Run a generator; its output. Raises BenchError with what it said."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + SLACK_S, check=False)
    except FileNotFoundError:
        raise BenchError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise BenchError(f"{command[0]} took more than {SLACK_S:g} s longer than its load of {seconds:g} s") from None
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def _json_line(said: str) -> dict[str, Any]:
    line = next((line for line in reversed(said.splitlines()) if line.startswith("{")), None)
    if line is None:
        raise BenchError(f"a load generator gave no result:\n{said[-1000:]}")
    found: dict[str, Any] = json.loads(line)
    return found


OWN_PYTHON = Path(sys.executable)
"""The bench's interpreter, which has the generator's libraries."""
