"""What the terminal shows during a run: one line for each measurement, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.bench.cases import WAYS, Step, Visit, expected_seconds
from tests.bench.samples import Sample
from tests.bench.statistics import cpu


def load_name(step: Step) -> str:
    """A load in words."""
    if step.load in WAYS:
        way = "" if step.load == "closed" else f", {step.load}"
        return f"{step.app}, {step.level} connections{way}"
    if step.load == "first":
        return f"{step.app}, first event, {step.level} connections"
    if step.load == "model":
        return f"{step.level} thread" if step.level == 1 else "all cores"
    return f"{step.app}, open loop"


def result(sample: Sample) -> str:
    """A measurement in one line."""
    text = f"{sample.rate:9.1f}/s"
    latency = sample.first_ms if sample.load == "first" and sample.first_ms else sample.latency_ms
    if latency:
        text += f"   p50 {latency['p50']:8.2f} ms   p99 {latency['p99']:8.2f} ms"
    if sample.load == "open":
        text += f"   p99.9 {latency['p99.9']:8.2f} ms"
    used = cpu(sample)
    if used is not None:
        text += f"   CPU {used:7.0f} us"
    if sample.errors:
        text += "   ERRORS: " + ", ".join(f"{count} {kind}" for kind, count in sorted(sample.errors.items()))
    return text


def remaining(visits: Sequence[Visit], done: int, elapsed_s: float) -> float:
    """Seconds that the visits after the first `done` will take, judged by how long those took."""
    expected = sum(map(expected_seconds, visits[done:]))
    past = sum(map(expected_seconds, visits[:done]))
    return expected * (elapsed_s / past if past else 1.0)


class Progress:
    """Prints; knows what comes."""

    def __init__(self, visits: Sequence[Visit], rounds: int) -> None:
        self._visits, self._rounds = visits, rounds
        self._began = time.monotonic()

    def visit(self, number: int) -> None:
        """Visit `number` (from 0) begins."""
        visit = self._visits[number]
        left = remaining(self._visits, number, time.monotonic() - self._began)
        minutes = f"about {left / 60:.0f} min left" if left > 90 else f"about {left:.0f} s left"
        print(
            f"[round {visit.round}/{self._rounds}] {', '.join(visit.apps)}: {visit.subject.label}   ({minutes})",
            flush=True,
        )

    def step(self, step: Step, sample: Sample) -> None:
        """A measurement is done."""
        print(f"    {load_name(step):36} {result(sample)}", flush=True)

    def failure(self, text: str) -> None:
        """A visit could not be measured."""
        print(f"    FAILED: {text}", flush=True)
