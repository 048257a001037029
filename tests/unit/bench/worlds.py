"""Results as a run could have found them."""

from __future__ import annotations

from typing import Any

from tests.bench.results import Results
from tests.bench.samples import Footprint, Sample


def sample(subject: str = "ours", app: str = "echo", load: str = "closed", level: int = 64, **changes: Any) -> Sample:
    """One measurement: 1,000 answers a second, p50 1 ms, p99 2 ms, in round 1, unless told otherwise."""
    fields: dict[str, Any] = {
        "round": 1,
        "seconds": 5.0,
        "requests": 5000,
        "rate": 1000.0,
        "latency_ms": {"p50": 1.0, "p90": 1.5, "p99": 2.0, "p99.9": 3.0, "max": 4.0},
    }
    return Sample(subject=subject, app=app, load=load, level=level, **{**fields, **changes})


def results(*samples: Sample, footprints: tuple[Footprint, ...] = (), **run: Any) -> Results:
    """A run with these samples."""
    machine = {
        "processor": "Some Processor",
        "cores": 2,
        "memory_gb": 8.0,
        "gpu": "",
        "virtual": False,
        "system": "Some Linux",
        "kernel": "6.1",
    }
    facts: dict[str, Any] = {
        "began": "2026-01-02T03:04:05+00:00",
        "mode": "processes",
        "rounds": 3,
        "seconds": 5.0,
        "parts": ["echo"],
        "device": "cpu",
        "torch_threads": 1,
        "watch": True,
        "machine": machine,
        "versions": {"pierhead": "abc123", "wrk": "wrk 4.1"},
        "uncommitted": False,
    }
    return Results({**facts, **run}, list(samples), list(footprints))
