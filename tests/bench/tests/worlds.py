"""Results as a run could have found them."""

from __future__ import annotations

from typing import Any

from tests.bench.load.generator import new_histogram
from tests.bench.results import Results
from tests.bench.samples import Footprint, Sample

MACHINE: dict[str, Any] = dict.fromkeys(("processor", "system", "kernel"), "some") | {"gpu": "", "virtual": False}
RUN: dict[str, Any] = {
    "began": "2026-01-02T03:04:05+00:00",
    "mode": "processes",
    "rounds": 3,
    "seconds": 5.0,
    "torch_threads": 1,
    "watch": True,
    "machine": {**MACHINE, "cores": 2, "memory_gb": 8.0},
    "versions": {"pierhead": "abc123"},
    "uncommitted": False,
}


def sample(subject: str = "ours", app: str = "echo", load: str = "closed", level: int = 64, **changes: Any) -> Sample:
    """One measurement: 1,000 answers a second, p50 1 ms, p99 2 ms, in round 1, unless `changes` say otherwise."""
    latency_ms = {"p50": 1.0, "p90": 1.5, "p99": 2.0, "p99.9": 3.0, "max": 4.0}
    fields = {"round": 1, "seconds": 5.0, "requests": 5000, "rate": 1000.0, "latency_ms": latency_ms, **changes}
    return Sample(subject=subject, app=app, load=load, level=level, **fields)


def results(*samples: Sample, footprints: tuple[Footprint, ...] = ()) -> Results:
    return Results(RUN, list(samples), list(footprints))


def histogram(*milliseconds: float) -> str:
    """These latencies as a sample has them."""
    found = new_histogram()
    for each in milliseconds:
        found.record_value(round(each * 1000))
    return str(found.encode().decode())
