"""Calls the load generators and reads what they say."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.processes import ROOT, BenchError

LUA = Path(__file__).with_name("wrk.lua")
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
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


def wrk(url: str, connections: int, seconds: float) -> Outcome:
    """Closed loop. Latencies are wrk's own: it fills in for answers that took more than twice the mean interval."""
    users = ["--", "users"] if "{user_id}" in url else []
    whole = max(1, round(seconds))  # wrk takes no fractions
    command = ["wrk", "-t1", f"-c{connections}", f"-d{whole}s", "--timeout", "30s", "-s", str(LUA), url, *users]
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


GRPC_HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")


def h2load(address: str, method: str, message: bytes, reply_bytes: int, calls: int, seconds: float) -> Outcome:
    """Plain gRPC: `calls` in flight on one connection for each eight of them.

    h2load looks at no grpc-status; a refused call has no message, so the bytes of the answers tell: `reply_bytes` each.
    """
    clients = max(1, calls // 8)
    with tempfile.TemporaryDirectory() as directory:
        body, log = Path(directory, "body"), Path(directory, "log")
        body.write_bytes(b"\x00" + len(message).to_bytes(4, "big") + message)
        command = ["h2load", "-c", str(clients), "-m", str(calls // clients), "-D", str(max(1, round(seconds)))]
        command += ["-d", str(body), f"--log-file={log}", *GRPC_HEADERS, f"http://{address}{method}"]
        said = _run(command, seconds)
        micros = sorted(
            int(line.split("\t")[2]) for line in log.read_text().splitlines() if line.split("\t")[1] == "200"
        )
    return read_h2load(said, micros, reply_bytes + 5)


def read_h2load(said: str, micros: Sequence[int], answer_bytes: int) -> Outcome:
    """`micros`: latencies of the answers with status 200, sorted."""
    finished = re.search(r"finished in ([\d.]+)(m?s)", said)
    counts = re.search(r"requests: .* (\d+) done, (\d+) succeeded, (\d+) failed", said)
    data = re.search(r"headers \(space savings .*?\), .*?\((\d+)\) data", said)
    if not (finished and counts and data):
        raise BenchError(f"h2load said something else than expected:\n{said[-1000:]}")
    done, succeeded = int(counts[1]), int(counts[2])
    refused = succeeded - int(data[1]) // answer_bytes
    errors = {"failed": int(counts[3]), "without a message": max(0, refused)}
    seconds = float(finished[1]) / (1000 if finished[2] == "ms" else 1)
    return Outcome(
        requests=done,
        seconds=seconds,
        worked_on=done,
        errors={name: count for name, count in errors.items() if count},
        latency_ms=_of_sorted(micros),
        bytes_each=int(data[1]) / max(1, succeeded),
    )


def _of_sorted(micros: Sequence[int]) -> dict[str, float]:
    if len(micros) < 2:
        return {}
    cuts = statistics.quantiles(micros, n=1000, method="inclusive")
    return {
        "p50": cuts[499] / 1e3,
        "p90": cuts[899] / 1e3,
        "p99": cuts[989] / 1e3,
        "p99.9": cuts[998] / 1e3,
        "max": micros[-1] / 1e3,
    }


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
