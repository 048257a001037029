"""One measurement as a value, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """What one load saw of one subject in one round."""

    round: int
    subject: str
    app: str
    load: str
    level: int
    """Connections, calls in flight, or threads: see cases.Step."""
    seconds: float
    requests: int
    """Answered or failed."""
    rate: float
    """Good answers a second."""
    latency_ms: Mapping[str, float]
    """p50, p90, p99, p99.9, max; empty where there is none."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Anything that was not a complete answer with status 200, by kind; only kinds that occurred."""
    offered_rate: float = 0.0
    """Arrivals a second of an open loop."""
    first_ms: Mapping[str, float] = field(default_factory=dict)
    """Time to the first event of a stream, as latency_ms."""
    histogram: str = ""
    """Latencies of an open loop, encoded (HdrHistogram, microseconds), so that rounds can be merged."""
    lag_p99_ms: float = 0.0
    """How late the generator itself was in an open loop."""
    cpu_us: Mapping[str, float] = field(default_factory=dict)
    """CPU microseconds of one request, by role: "generator" is the load's, "rest" what else the machine used."""
    rest_cores: float = 0.0
    """Cores in use by "rest"."""
    stolen_cores: float = 0.0
    """Taken by the hypervisor."""

    def as_json(self) -> dict[str, Any]:
        """For the results file; what is empty is left out."""
        return {name: value for name, value in asdict(self).items() if value not in ({}, "", 0.0) or name == "level"}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Sample:
        """The reverse."""
        return cls(**{"seconds": 0.0, "requests": 0, "rate": 0.0, "latency_ms": {}, **fields})


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one subject in one round, by role (see processes.Memory)."""

    round: int
    subject: str
    chain: str
    when: str
    """idle: ready, a few requests answered. loaded: after its last load."""
    roles: Mapping[str, Mapping[str, float]]

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)
