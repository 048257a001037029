"""The results of a simulation in numbers and words. Pure. Times are in seconds unless a name says otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .simulation import Result, Sample
from .traces import Step


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles and maximum of durations; None where there are none."""

    p50: float | None
    p99: float | None
    most: float | None


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """How replicas followed a step of the rate. Times are since the step, and until there are as many as `allowed`;
    None = not before the next step or the end.
    """

    at_s: float
    rate_before: float
    rate_after: float
    needed: int
    """Replicas for the new rate, by the mean time of a request; with a policy: the number that was reached."""
    allowed: int
    """So many of them as `min` and `max` allow."""
    decided_after_s: float | None
    ready_after_s: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The table. `reversals`: changes of the target in the other direction than the change before."""

    trace: str
    duration_s: float
    requests: int
    served: int
    refused: int
    timed_out: int
    lost: int
    unfinished: int
    latency_s: Spread
    wait_s: Spread
    most_waiting: int
    target_first: int
    target_last: int
    target_most: int
    target_changes: int
    reversals: int
    replica_seconds: float
    ready_replica_seconds: float
    starts: int
    failed_starts: int
    steps: tuple[StepAnswer, ...]


def summarise(result: Result) -> Summary:
    """Count and measure."""
    requests, samples = result.requests, result.samples
    targets = [sample.target for sample in samples]
    changes = [after - before for before, after in itertools.pairwise(targets) if after != before]
    served, refused = len(requests.finished_at), len(requests.refused_at)
    return Summary(
        trace=result.trace.name,
        duration_s=result.trace.duration_s,
        requests=len(requests.arrived),
        served=served,
        refused=refused,
        timed_out=requests.timed_out,
        lost=requests.lost,
        unfinished=len(requests.arrived) - served - refused - requests.lost,
        latency_s=_spread(requests.latency),
        wait_s=_spread(requests.waited),
        most_waiting=max((sample.waiting for sample in samples), default=0),
        target_first=targets[0],
        target_last=targets[-1],
        target_most=max(targets),
        target_changes=len(changes),
        reversals=sum(before * after < 0 for before, after in itertools.pairwise(changes)),
        replica_seconds=_integral(result, [sample.present for sample in samples]),
        ready_replica_seconds=_integral(result, [sample.ready for sample in samples]),
        starts=result.starts,
        failed_starts=result.failed_starts,
        steps=tuple(_step_answers(result)),
    )


def percentile(ordered: Sequence[float], part: float) -> float | None:
    """The smallest value that `part` of all values do not exceed; None without values."""
    return ordered[max(math.ceil(part * len(ordered)) - 1, 0)] if ordered else None


def _spread(durations: Sequence[float]) -> Spread:
    ordered = sorted(round(max(0.0, duration), 6) for duration in durations)
    return Spread(percentile(ordered, 0.5), percentile(ordered, 0.99), ordered[-1] if ordered else None)


def _integral(result: Result, counts: Sequence[int]) -> float:
    """Sum counts over time; each one holds until the next sample, the last one until the end."""
    times = [*(sample.at_s for sample in result.samples), result.trace.duration_s]
    return round(sum(count * (end - at) for count, (at, end) in zip(counts, itertools.pairwise(times), strict=True)), 3)


def _step_answers(result: Result) -> Iterator[StepAnswer]:
    steps = result.trace.steps
    ends = [*(step.at_s for step in steps), result.trace.duration_s][1:]
    for step, end in zip(steps, ends, strict=True):
        samples = [sample for sample in result.samples if step.at_s <= sample.at_s < end]
        if samples:
            yield _step_answer(result, step, samples)


def _step_answer(result: Result, step: Step, samples: Sequence[Sample]) -> StepAnswer:
    up = step.after > step.before
    if result.autoscale.policy is None:
        busy = step.after * result.setting.service_time.mean
        needed = math.ceil(busy / result.autoscale.target_ongoing_requests - 1e-9)
    else:
        targets = [sample.target for sample in samples]
        needed = max(targets) if up else min(targets)
    allowed = result.autoscale.clamp(needed)

    def first(there: Iterator[tuple[float, int]]) -> float | None:
        reached = (at - step.at_s for at, count in there if (count >= allowed if up else count <= allowed))
        return next((round(after_s, 3) for after_s in reached), None)

    return StepAnswer(
        step.at_s,
        step.before,
        step.after,
        max(needed, allowed),
        allowed,
        first((sample.at_s, sample.target) for sample in samples),
        first((sample.at_s, sample.ready) for sample in samples),
    )


# --------------------------------------------------------------------------------------------------------------- words


def document(result: Result, summary: Summary) -> dict[str, Any]:
    """The JSON form: the summary, what was assumed, and the controller's events."""
    setting, spec = result.setting, result.spec
    return {
        "summary": asdict(summary),
        "assumed": {
            "service_time_s": "from the trace" if result.trace.service_times is not None else setting.service_time.text,
            "start_time_s": setting.start_time.text,
            "places": setting.places or spec.max_ongoing_requests,
            "failing_starts": setting.failing_starts,
            "gpus": setting.gpus,
            "seed": setting.seed,
        },
        "events": [asdict(event) for event in result.events],
    }


def table(result: Result, summary: Summary) -> str:
    """The text form."""
    requests = f"{summary.requests:,}: {summary.served:,} served, {summary.refused:,} refused"
    if summary.timed_out:
        requests += f" ({summary.timed_out:,} after request_timeout_s)"
    if summary.lost:
        requests += f", {summary.lost:,} lost with their replica"
    if summary.unfinished:
        requests += f", {summary.unfinished:,} not finished at the end"
    changes = f"{summary.target_first} at first, {summary.target_last} at last, {summary.target_most} at most"
    starts = f"{summary.starts}" + (f", {summary.failed_starts} failed" if summary.failed_starts else "")
    rows = [
        ("requests", requests),
        ("latency", _spread_words(summary.latency_s)),
        ("wait before work", _spread_words(summary.wait_s)),
        ("most in the line", f"{summary.most_waiting:,}"),
        ("target", changes),
        ("target changes", f"{summary.target_changes}, {summary.reversals} of them back"),
        ("replica seconds", f"{summary.replica_seconds:,.0f}, ready for {summary.ready_replica_seconds:,.0f} of them"),
        ("replicas started", starts),
        *(("step", step_words(step)) for step in summary.steps),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{result.spec.name}, {result.trace.name}, {span_words(summary.duration_s)}"]
    lines += [f"  {name.ljust(width)}  {words}" for name, words in rows]
    lines += [f"  at {event.at_s:,.0f} s: {event.message}" for event in result.events if event.kind == "policy_failed"]
    return "\n".join(lines)


def step_words(step: StepAnswer) -> str:
    """One sentence about a step."""

    def after(seconds: float | None) -> str:
        return "never" if seconds is None else f"after {seconds:.1f} s"

    beyond = f", more than max ({step.allowed}): max" if step.needed > step.allowed else ":"
    return (
        f"{step.rate_before:g} -> {step.rate_after:g}/s at {step.at_s:g} s needs {step.needed}{beyond} "
        f"wanted {after(step.decided_after_s)}, ready {after(step.ready_after_s)}"
    )


def span_words(seconds: float) -> str:
    """A duration in its usual unit."""
    if seconds < 600:
        return f"{seconds:g} s"
    return f"{seconds / 60:.4g} min" if seconds < 7200 else f"{seconds / 3600:.4g} h"


def _spread_words(spread: Spread) -> str:
    if spread.p50 is None:
        return "nothing was served"
    return f"p50 {_time(spread.p50)}, p99 {_time(spread.p99)}, max {_time(spread.most)}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
