"""The tables of a report, as lines of Markdown. Pure, but for reading encoded histograms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tests.bench.cases import APPS, BARE, EIGHT, OURS, PEER, REPLICAS, TRITON, VARIANTS, WAYS, App, Subject
from tests.bench.results import Results
from tests.bench.statistics import Figure, Samples, Spread, cpu, first, latency, outside, rate, resident
from tests.bench.targets import shown, told

ROLES = {
    "haproxy": "HAProxy",
    "ingress": "ingress",
    "child": "child",
    "docker-proxy": "docker-proxy",
    "dockerd": "dockerd",
    "containerd": "containerd and shims",
    "controller": "controller",
    "prometheus": "Prometheus",
    "ray": "Ray's own",
    "rest": "rest of the machine",
    "generator": "load generator",
}
SIDES = (("ours", "Pierhead"), ("peer", "Ray Serve"))


def main_table(samples: Samples) -> Iterator[str]:
    yield "## Closed loop"
    yield ""
    yield (
        "Each connection sends its next request when the last is answered. Medians of the rounds. CPU: microseconds of "
        "the whole machine for one request, the load generator's apart."
    )
    yield ""
    rows = [
        _main_row(samples, app, load, level)
        for app in APPS.values()
        for load in WAYS
        for level in samples.levels(app.name, load)
    ]
    figures = [f"{name} {side}" for name in ("p50 ms", "p99 ms", "CPU us") for side in ("", "Ray's")]
    head = ["", "connections", "asked at", "Pierhead /s", "Ray Serve /s", "ratio", *figures, "p99 ratio", "errors"]
    yield from table([cell.strip() for cell in head], rows)


def _main_row(samples: Samples, app: App, load: str, level: int) -> list[str]:
    def one(figure: Figure, subject: str) -> str:
        return _number(samples.spread(figure, subject, app.name, load, level))

    def ratio(figure: Figure) -> str:
        found = samples.ratio(figure, "ours", "peer", app.name, load, level)
        return shown(found) if found else ""

    errors = [_errors(samples.errors(subject, app.name, load, level)) for subject in ("ours", "peer")]
    return [
        app.name,
        str(level),
        WAYS[load],
        one(rate, "ours"),
        one(rate, "peer"),
        ratio(rate),
        *(one(figure, subject) for figure in (latency("p50"), latency("p99"), cpu) for subject in ("ours", "peer")),
        ratio(latency("p99")),
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


def costs(samples: Samples) -> Iterator[str]:
    """Where each row's CPU time goes."""
    wanted: list[tuple[Subject, App, str]] = [(OURS, app, load) for app in APPS.values() for load in WAYS]
    wanted += [(BARE, APPS["echo"], "alone")]
    wanted += [(subject, app, "closed") for subject in (BARE, PEER, *VARIANTS, TRITON, *EIGHT) for app in APPS.values()]
    found = [
        (subject, app, load, level, samples.costs(subject.key, app.name, load, level))
        for subject, app, load in wanted
        for level in samples.levels(app.name, load, subject.key)
    ]
    roles = [role for role in ROLES if any(role in used for *_, used in found)]
    rows = [
        [
            f"{subject.label}{f', {REPLICAS} and {REPLICAS} replicas' if subject.replicas else ''}",
            f"{app.name}, {level}{'' if load == 'closed' else f', {load}'}",
            _number(samples.spread(cpu, subject.key, app.name, load, level)),
            told(samples.spread(outside, subject.key, app.name, load, level), "{:.0%}"),
            *(_us(used[role]) if role in used else "" for role in roles),
        ]
        for subject, app, load, level, used in found
        if used
    ]
    if rows:
        yield "## Where the CPU time of a request goes, microseconds"
        yield ""
        yield (
            "All of the machine but the load generator; the share of it outside HAProxy, ingress and child; then "
            "by process group. Rest of the machine: the kernel's work that is no process's, and whatever else ran."
        )
        yield ""
        yield from table(["", "connections", "all", "outside", *(ROLES[role] for role in roles)], rows)


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def memory(results: Results) -> Iterator[str]:
    """Of each side, ready and after its loads."""
    rows = []
    for subject in (OURS, PEER, *EIGHT):
        for chain in dict.fromkeys(app.chain for app in APPS.values()):
            idle, loaded = (
                resident(results.footprints, subject.key, chain, when, "pss_mb") for when in ("idle", "loaded")
            )
            if not idle:
                continue
            each = resident(results.footprints, subject.key, chain, "idle", "largest_rss_mb")
            replicas = [f"{each[role]:.0f}" if role in each else "" for role in ("ingress", "child")]
            label = f"{subject.label}{f', {REPLICAS} and {REPLICAS} replicas' if subject.replicas else ''}"
            rows.append([label, chain, f"{sum(idle.values()):.0f}", f"{sum(loaded.values()):.0f}", *replicas])
    if rows:
        yield "## Memory, MB"
        yield ""
        yield "Of the whole side, control plane and engine included (proportional set size); resident set of a replica."
        yield ""
        yield from table(["", "", "idle", "after load", "an idle ingress", "an idle child"], rows)


def eight(samples: Samples) -> Iterator[str]:
    """The same chain with eight replicas of each service."""
    rows = []
    for app in APPS.values():
        for subject in EIGHT:
            for level in samples.levels(app.name, "closed", subject.key):
                of = (app.name, "closed", level)
                figures = [
                    samples.spread(figure, subject.key, *of) for figure in (rate, latency("p50"), latency("p99"), cpu)
                ]
                ratios = [samples.ratio(rate, "ours:eight", other.key, *of) for other in EIGHT[1:]]
                of_peers = [shown(ratio) if ratio and subject is EIGHT[0] else "" for ratio in ratios]
                errors = _errors(samples.errors(subject.key, *of)) or "none"
                rows.append([f"{app.name}, {level}", subject.label, *map(_number, figures), *of_peers, errors])
    if rows:
        yield f"## {REPLICAS} ingress and {REPLICAS} child replicas, one round"
        yield ""
        yield from table(
            ["connections", "", "/s", "p50 ms", "p99 ms", "CPU us", "of Ray Serve's best", "of its default", "errors"],
            rows,
        )


def limits(samples: Samples) -> Iterator[str]:
    rows: list[list[str]] = []
    for app in APPS.values():
        for level in samples.levels(app.name, "closed", "bare"):
            label = f"{app.name}, {level} connections: {BARE.label}"
            rows.append(_limit_row(samples, label, "bare", app.name, "closed", level))
        for level in samples.levels(app.name, "alone", "bare"):
            label = f"{app.name}, {level} connections: HAProxy and a handler without a call"
            rows.append(_limit_row(samples, label, "bare", app.name, "alone", level))
    for threads, label in ((1, "one core"), (0, "all cores")):
        if found := samples.spread(rate, "model", "dlrm", "model", threads):
            rows.append([f"DLRM, the model alone, {label}", _number(found), *[""] * 7])
    rows = [row for row in rows if row]
    if rows:
        yield "## Limits"
        yield ""
        yield (
            "The same chain: HAProxy with one frontend and one backend, an aiohttp handler, a grpc.aio stub, a "
            "grpc.aio server; without admission, deadlines, request ids, metrics, retries, probes and access lines."
        )
        yield ""
        head = ["", "/s", "p50 ms", "p99 ms", "CPU us", "of Ray Serve's /s", "p50", "p99", "CPU of Pierhead's"]
        yield from table(head, rows)


def _limit_row(samples: Samples, label: str, subject: str, app: str, load: str, level: int) -> list[str]:
    found = samples.spread(rate, subject, app, load, level)
    if found is None:
        return []
    figures = (latency("p50"), latency("p99"), cpu)
    others = (("peer", rate), ("peer", latency("p50")), ("peer", latency("p99")), ("ours", cpu))
    ratios = [samples.ratio(each, subject, other, app, load, level, "closed") for other, each in others]
    return [
        label,
        _number(found),
        *(_number(samples.spread(each, subject, app, load, level)) for each in figures),
        *(shown(each) if each else "" for each in ratios),
    ]


def ablation(samples: Samples) -> Iterator[str]:
    rows = []
    for variant in (*VARIANTS, TRITON):
        for app in APPS.values():
            for level in samples.levels(app.name, "closed", variant.key):
                of = (app.name, "closed", level)
                rows.append(
                    [
                        variant.label,
                        f"{app.name}, {level}",
                        _number(samples.spread(rate, variant.key, *of)),
                        shown(samples.ratio(rate, variant.key, "ours", *of)),
                        *(
                            _number(samples.spread(each, variant.key, *of))
                            for each in (latency("p50"), latency("p99"), cpu)
                        ),
                        shown(samples.ratio(cpu, variant.key, "ours", *of)),
                    ]
                )
    if rows:
        yield "## Ablation: Pierhead but for one thing"
        yield ""
        yield from table(
            ["", "connections", "/s", "of Pierhead's", "p50 ms", "p99 ms", "CPU us", "of Pierhead's"], rows
        )


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
