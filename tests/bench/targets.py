"""What the product promises, line by line, and whether a run met it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.results import Results
from tests.bench.statistics import Samples, Spread, first, latency, limit_on, rate, resident

REPLICA_MB = 60.0


@dataclass(frozen=True, slots=True)
class Line:
    """One promise. `met` is None where the run did not measure it."""

    what: str
    wanted: str
    found: str
    met: bool | None


def lines(results: Results) -> list[Line]:
    """Every promise in the order of the table."""
    samples = Samples(results.samples)
    return [
        _at_least(
            "echo, 64 connections: rate", samples.ratio(rate, "ours", "peer", "echo", "closed", 64), 15, "Ray Serve's"
        ),
        _at_most("echo, 64 connections: p99", _peer(samples, "p99", "echo", 64), 1 / 12, "Ray Serve's"),
        _at_most("echo, 1 connection: p50", _peer(samples, "p50", "echo", 1), 1 / 4, "Ray Serve's"),
        _at_most(
            "echo, 1 connection: p50",
            samples.ratio(latency("p50"), "ours", "bare", "echo", "closed", 1),
            1.10,
            "the same chain on plain grpc.aio",
        ),
        _at_least(
            "stream, 32 connections: rate",
            samples.ratio(rate, "ours", "peer", "stream", "closed", 32),
            8,
            "Ray Serve's",
        ),
        _at_most("stream, 32 connections: p99", _peer(samples, "p99", "stream", 32), 1 / 8, "Ray Serve's"),
        *_first_events(samples),
        _at_least(
            "DLRM, 100 users: rate", samples.ratio(rate, "ours", "peer", "dlrm", "closed", 100), 3, "Ray Serve's"
        ),
        _at_most("DLRM, 100 users: p99", _peer(samples, "p99", "dlrm", 100), 1 / 3, "Ray Serve's"),
        _at_least(
            "echo chain, 64 connections: rate",
            _ratio_to_single_stage(samples),
            0.55,
            "one aiohttp stage behind the same HAProxy",
        ),
        _model_share(results, samples),
        _replica_memory(results),
    ]


def _peer(samples: Samples, percentile: str, app: str, level: int) -> Spread | None:
    return samples.ratio(latency(percentile), "ours", "peer", app, "closed", level)


def _ratio_to_single_stage(samples: Samples) -> Spread | None:
    return samples.ratio(rate, "ours", "single_stage", "echo", "closed", 64)


def _first_events(samples: Samples) -> Iterator[Line]:
    whose = "the same chain's on plain grpc.aio"
    alone = samples.ratio(first("p50"), "ours", "bare", "stream", "first", 1)
    yield _at_most("stream, 1 connection: first event, p50", alone, 1.0, whose)
    loaded = samples.ratio(first("p50"), "ours", "bare", "stream", "open")
    yield _at_most("stream, open loop: first event, p50", loaded, 1.0, whose)


def model_limit(results: Results, samples: Samples) -> tuple[float, float] | None:
    """Cores that a DLRM run at 100 users leaves to the model, and the model's rate on them."""
    one, every = (samples.spread(rate, "model", "dlrm", "model", threads) for threads in (1, 0))
    cores = samples.cores("ours", "dlrm", "closed", 100)
    if one is None or every is None or not cores:
        return None
    machine = int(results.run["machine"]["cores"])
    left = machine - sum(used for role, used in cores.items() if role not in ("child", "elsewhere"))
    return left, limit_on(left, one.median, every.median, machine)


def _model_share(results: Results, samples: Samples) -> Line:
    what = "DLRM, 100 users: rate"
    limit = model_limit(results, samples)
    ours = samples.spread(rate, "ours", "dlrm", "closed", 100)
    if limit is None or ours is None:
        return Line(what, ">= 0.60 of the model alone", "not measured", None)
    left, of_model = limit
    share = ours.median / of_model
    found = f"{share:.2f} of {of_model:,.0f}/s on the {left:.2f} cores left"
    return Line(what, ">= 0.60 of the model alone", found, share >= 0.60)


def _replica_memory(results: Results) -> Line:
    what, wanted = "an idle echo replica's resident memory", f"<= {REPLICA_MB:g} MB"
    roles = resident(results.footprints, "ours", "echo", "idle", "largest_rss_mb")
    replicas = {role: size for role, size in roles.items() if role in ("ingress", "child")}
    if not replicas:
        return Line(what, wanted, "not measured", None)
    found = ", ".join(f"{role} {size:.0f} MB" for role, size in sorted(replicas.items()))
    return Line(what, wanted, found, max(replicas.values()) <= REPLICA_MB)


def _at_least(what: str, ratio: Spread | None, bound: float, whose: str) -> Line:
    wanted = f">= {_share(bound)} {whose}"
    return Line(what, wanted, shown(ratio), None if ratio is None else ratio.median >= bound)


def _at_most(what: str, ratio: Spread | None, bound: float, whose: str) -> Line:
    wanted = f"<= {_share(bound)} {whose}"
    return Line(what, wanted, shown(ratio), None if ratio is None else ratio.median <= bound)


def _share(bound: float) -> str:
    return f"1/{round(1 / bound)} of" if bound < 0.5 else f"{bound:.2f} x" if bound < 2 else f"{bound:g} x"


def shown(ratio: Spread | None) -> str:
    """A ratio with its spread; below 1/2 as a fraction."""
    if ratio is None:
        return "not measured"
    text = _one(ratio.median)
    return text if ratio.rounds == 1 else f"{text} ({_one(min(ratio.low, ratio.high))} to {_one(ratio.high)})"


def _one(value: float) -> str:
    if 0 < value < 0.5:
        return f"1/{1 / value:.1f}"
    return f"{value:.2f} x" if value < 10 else f"{value:.1f} x"
