"""What the product promises, line by line, and whether a run met it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.cases import APPS
from tests.bench.results import Results
from tests.bench.statistics import Samples, Spread, latency, outside, rate, resident, tail

REPLICA_MB = 60.0
OUTSIDE = 0.10
"""Of a request's CPU time: the most that may be spent outside HAProxy, ingress and callee."""
TAIL = 1.8
"""P99 by p50 of the DLRM at 100 connections."""


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
        _at_most("echo, 1 connection: p50", _peer(samples, "p50", "echo", 1), 1 / 4),
        *_rate_and_tail(samples, "echo", 12, "; aim 15", 12),
        *_rate_and_tail(samples, "stream", 6, "; aim 8", 6),
        *_rate_and_tail(samples, "dlrm", 3, "", 3),
        _below("dlrm, 100 connections: p99", f"<= {TAIL:g} x its p50", samples.spread(tail, *_main("dlrm")), TAIL),
        *(
            _below(
                f"{_at(app)}: CPU outside HAProxy, ingress and child",
                f"<= {OUTSIDE:.0%} of a request's",
                samples.spread(outside, *_main(app)),
                OUTSIDE,
                "{:.0%}",
            )
            for app in APPS
        ),
        _replica_memory(results),
    ]


def _main(app: str) -> tuple[str, str, str, int]:
    return "ours", app, "closed", APPS[app].main_level


def _at(app: str) -> str:
    return f"{app}, {APPS[app].main_level} connections"


def _rate_and_tail(samples: Samples, app: str, times: float, aim: str, tail_of: float) -> Iterator[Line]:
    ratio = samples.ratio(rate, "ours", "peer", app, "closed", APPS[app].main_level)
    met = None if ratio is None else ratio.median >= times
    yield Line(f"{_at(app)}: rate", f">= {times:g} x Ray Serve's{aim}", shown(ratio), met)
    yield _at_most(f"{_at(app)}: p99", _peer(samples, "p99", app, APPS[app].main_level), 1 / tail_of)


def _peer(samples: Samples, percentile: str, app: str, level: int) -> Spread | None:
    return samples.ratio(latency(percentile), "ours", "peer", app, "closed", level)


def _replica_memory(results: Results) -> Line:
    what, wanted = "an idle echo replica's resident memory", f"<= {REPLICA_MB:g} MB"
    roles = resident(results.footprints, "ours", "echo", "idle", "largest_rss_mb")
    replicas = {role: size for role, size in roles.items() if role in ("ingress", "child")}
    if not replicas:
        return Line(what, wanted, "not measured", None)
    found = ", ".join(f"{role} {size:.0f} MB" for role, size in sorted(replicas.items()))
    return Line(what, wanted, found, max(replicas.values()) <= REPLICA_MB)


def _at_most(what: str, ratio: Spread | None, bound: float) -> Line:
    met = None if ratio is None else ratio.median <= bound
    return Line(what, f"<= 1/{round(1 / bound)} of Ray Serve's", shown(ratio), met)


def _below(what: str, wanted: str, spread: Spread | None, bound: float, form: str = "{:.2f} x") -> Line:
    if spread is None:
        return Line(what, wanted, "not measured", None)
    return Line(what, wanted, told(spread, form), spread.median <= bound)


def told(spread: Spread | None, form: str) -> str:
    """A figure with its spread; empty where there is none."""
    if spread is None:
        return ""
    text = form.format(spread.median)
    return text if spread.rounds == 1 else f"{text} ({form.format(spread.low)} to {form.format(spread.high)})"


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
