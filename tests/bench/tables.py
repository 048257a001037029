"""The tables of a report, as lines of Markdown. Pure, but for reading encoded histograms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tests.bench.cases import APPS, VARIANTS, App
from tests.bench.results import Results
from tests.bench.statistics import Figure, Samples, Spread, first, latency, rate, resident
from tests.bench.targets import model_limit, shown

ROLE_NAMES = {
    "ingress": "ingress",
    "child": "child",
    "haproxy": "HAProxy",
    "rest": "the rest",
    "generator": "generator",
}
SIDES = (("ours", "Pierhead"), ("peer", "Ray Serve"))


def main_table(samples: Samples) -> Iterator[str]:
    yield "## Closed loop"
    yield ""
    yield "Each connection sends its next request when the last is answered. Medians of the rounds."
    yield ""
    rows = []
    for app in APPS.values():
        for level in samples.levels(app.name, "closed"):
            rows.append(_main_row(samples, app, level))  # noqa: PERF401 - two loops in one bracket read worse
    yield from table(
        [
            "",
            "connections",
            "Pierhead /s",
            "Ray Serve /s",
            "ratio",
            "p50 ms",
            "Ray's",
            "p99 ms",
            "Ray's",
            "p99 ratio",
            "errors",
        ],
        rows,
    )


def _main_row(samples: Samples, app: App, level: int) -> list[str]:
    def one(figure: Figure, subject: str) -> str:
        return _number(samples.spread(figure, subject, app.name, "closed", level))

    errors = [_errors(samples.errors(subject, app.name, "closed", level)) for subject in ("ours", "peer")]
    return [
        app.name,
        str(level),
        one(rate, "ours"),
        one(rate, "peer"),
        shown(samples.ratio(rate, "ours", "peer", app.name, "closed", level)),
        *(one(latency(percentile), subject) for percentile in ("p50", "p99") for subject in ("ours", "peer")),
        shown(samples.ratio(latency("p99"), "ours", "peer", app.name, "closed", level)),
        "none" if errors == ["", ""] else f"{errors[0] or 'none'}; Ray's: {errors[1] or 'none'}",
    ]


def open_table(samples: Samples) -> Iterator[str]:
    from tests.bench.load.tools import percentiles_ms

    rows = []
    for app in APPS.values():
        for subject, label in SIDES:
            found = samples.of(subject, app.name, "open")
            if not found:
                continue
            merged = percentiles_ms(*(sample.histogram for sample in found))
            errors = _errors(samples.errors(subject, app.name, "open"))
            rate_found = Spread.of(sample.rate for sample in found)
            figures = [_ms(merged[name]) for name in ("p50", "p90", "p99", "p99.9", "max")]
            lag = max(sample.lag_p99_ms for sample in found)
            rows.append(
                [
                    app.name,
                    label,
                    f"{found[0].offered_rate:g}",
                    _number(rate_found),
                    *figures,
                    _ms(lag),
                    errors or "none",
                ]
            )
    if rows:
        yield "## Open loop"
        yield ""
        yield (
            "A constant arrival rate, 70 % of the smaller peak; latency counts from when a request was due, whether or "
            "not it could be sent. All rounds in one histogram. Generator: how late it sent what could be sent, p99."
        )
        yield ""
        yield from table(
            ["", "", "arrivals /s", "answered /s", "p50 ms", "p90", "p99", "p99.9", "max", "generator ms", "errors"],
            rows,
        )


def first_events(samples: Samples) -> Iterator[str]:
    rows = []
    for level in samples.levels("stream", "first"):
        row = [f"{level} connections, closed loop"]
        row += [
            _number(samples.spread(first("p50"), who, "stream", "first", level)) for who in ("ours", "peer", "bare")
        ]
        row += [
            _number(samples.spread(first("p99"), who, "stream", "first", level)) for who in ("ours", "peer", "bare")
        ]
        rows.append(row)
    if samples.of("ours", "stream", "open"):
        row = [f"open loop, {samples.of('ours', 'stream', 'open')[0].offered_rate:g} /s"]
        row += [_number(samples.spread(first("p50"), who, "stream", "open")) for who in ("ours", "peer", "bare")]
        row += [_number(samples.spread(first("p99"), who, "stream", "open")) for who in ("ours", "peer", "bare")]
        rows.append(row)
    if rows:
        yield "## Time to the first event of a stream, ms"
        yield ""
        yield from table(["", "p50", "Ray's", "plain gRPC's", "p99", "Ray's", "plain gRPC's"], rows)


def costs(results: Results, samples: Samples) -> Iterator[str]:
    rows = []
    for app in APPS.values():
        for subject, label in SIDES:
            costs = samples.costs(subject, app.name, "closed", app.main_level)
            if not costs:
                continue
            served = sum(cost for role, cost in costs.items() if role != "generator")
            idle = resident(results.footprints, subject, app.name, "idle", "pss_mb")
            loaded = resident(results.footprints, subject, app.name, "loaded", "pss_mb")
            rows.append(
                [
                    app.name,
                    label,
                    f"{served / 1000:.2f}",
                    *(f"{costs[role] / 1000:.2f}" if role in costs else "" for role in ROLE_NAMES),
                    f"{sum(idle.values()):.0f}",
                    f"{sum(loaded.values()):.0f}",
                ]
            )
    if rows:
        yield "## What it costs"
        yield ""
        yield (
            "CPU seconds per 1,000 requests at "
            + ", ".join(f"{a.main_level} ({a.name})" for a in APPS.values())
            + " connections, by process group (the rest: Ray's controller, raylet and agents; in containers our "
            "controller, Prometheus and "
            "Docker); memory of the whole side (proportional set size), idle and after load."
        )
        yield ""
        yield from table(["", "", "all but the generator", *ROLE_NAMES.values(), "idle MB", "loaded MB"], rows)
    replicas = []
    for subject, label in SIDES:
        roles = resident(results.footprints, subject, "echo", "idle", "largest_rss_mb")
        if roles:
            each = ", ".join(
                f"{ROLE_NAMES[role]} {roles[role]:.0f} MB" for role in ("ingress", "child") if role in roles
            )
            replicas.append(f"{label}: {each}")
    if replicas:
        yield f"Resident set of one idle echo replica: {'; '.join(replicas)}."
        yield ""


def limits(results: Results, samples: Samples) -> Iterator[str]:
    rows: list[list[str]] = []
    for level in (1, APPS["echo"].main_level):
        for subject, label in (
            ("single_stage", "one aiohttp stage behind HAProxy"),
            ("asgi_stage", "one FastAPI stage in the runtime, behind HAProxy"),
            ("bare", "aiohttp and plain grpc.aio"),
        ):
            of = ("echo", "closed", level)
            rows.append(_limit_row(samples, f"echo, {level} connections: {label}", subject, *of))
    rows.append(
        _limit_row(samples, "stream, 32 connections: aiohttp and plain grpc.aio", "bare", "stream", "closed", 32)
    )
    for calls in (1, 64):
        for subject, label in (("ours", "our child"), ("bare", "a plain grpc.aio server")):
            rows.append(
                _limit_row(samples, f"plain gRPC to {label}, {calls} calls in flight", subject, "echo", "grpc", calls)
            )
    for threads, label in ((1, "one core"), (0, "all cores")):
        rows.append(_limit_row(samples, f"DLRM, the model alone, {label}", "model", "dlrm", "model", threads))
    rows = [row for row in rows if row]
    if rows:
        yield "## Limits"
        yield ""
        yield from table(["", "/s", "p50 ms", "p99 ms"], rows)
    limit = model_limit(results, samples)
    if limit:
        left, of_model = limit
        yield (
            f"At 100 users everything but the ranker leaves {left:.2f} cores to it; "
            f"the model alone does {of_model:,.0f}/s on those."
        )
        yield ""


def _limit_row(samples: Samples, label: str, subject: str, app: str, load: str, level: int) -> list[str]:
    found = samples.spread(rate, subject, app, load, level)
    if found is None:
        return []
    return [
        label,
        _number(found),
        *(_number(samples.spread(latency(p), subject, app, load, level)) for p in ("p50", "p99")),
    ]


def ablation(samples: Samples) -> Iterator[str]:
    rows = []
    for variant in VARIANTS:
        for app in APPS.values():
            for level in samples.levels(app.name, "closed", variant.key):
                of = (app.name, "closed", level)
                rows.append(
                    [
                        variant.label,
                        f"{app.name}, {level}",
                        _number(samples.spread(rate, variant.key, *of)),
                        shown(samples.ratio(rate, variant.key, "ours", *of)),
                        _number(samples.spread(latency("p50"), variant.key, *of)),
                        _number(samples.spread(latency("p99"), variant.key, *of)),
                    ]
                )
    if rows:
        yield "## Ablation: Pierhead but for one thing"
        yield ""
        yield from table(["", "connections", "/s", "of Pierhead's", "p50 ms", "p99 ms"], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _number(spread: Spread | None) -> str:
    if spread is None:
        return ""
    value = spread.median
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ms(value: float) -> str:
    return _number(Spread(value, value, value, 1))


def _errors(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()))
