"""What the benches of the controller conclude from what they saw."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from simulator.distributions import parse_distribution
from simulator.report import summarise
from simulator.simulation import Result, Setting, simulate
from simulator.traces import Step, Trace
from tests.bench import autoscale_step, many_containers
from tests.bench.many_containers import READINGS, TICKS, Found, Growth, Rest, Start, TickBook, Ticks
from tests.harness.stack import ROOT, Answer
from tests.unit.controller.worlds import service

GOOD = Ticks(100, 0.02, 0.1, 1.0)


STARTS = (Start(0.0, 0.5, 1.5), Start(0.5, 1.0, 1.6), Start(1.0, 2.0, 3.0))


REST = Rest(50, 60.0, 3.0, 90.0, GOOD, 0.1)


@pytest.mark.parametrize(
    ("seconds", "changes", "broken"),
    [
        (3.0, {}, None),
        (8.5, {}, "0 to 3 replicas"),
        (3.0, {"haproxy_worker": (7, 8)}, "reloads of HAProxy"),
        (3.0, {"routing_writes": 1}, "reloads of HAProxy"),
        (3.0, {"rests": [replace(REST, resident_mb=151.0)]}, "the controller at rest, 50 replicas: memory"),
        (3.0, {"rests": [replace(REST, cpu_percent=5.1)]}, "the controller at rest, 50 replicas: CPU"),
        (3.0, {"rests": [replace(REST, ticks=replace(GOOD, within=0.99))]}, "a tick at rest, 50 replicas"),
    ],
)
def test_a_broken_promise_is_not_met(seconds: float, changes: dict[str, Any], broken: str | None) -> None:
    growth = Growth(3, seconds, STARTS, GOOD, 1.0, 2.0)
    assert (growth.engine_done_s, growth.slowest_s, growth.most_starting) == (2.0, 1.0, 2)
    found = replace(Found("tiny", growth, [REST], 5.0, (7, 7)), **changes)
    verdicts = {line.what: line.met for line in many_containers.lines(found)}
    assert len(verdicts) == 6
    assert [what for what, met in verdicts.items() if not met] == ([broken] if broken else [])


def histogram(*buckets: tuple[str, int], total: float, name: str = TICKS) -> str:
    lines = [f"# TYPE {name} histogram", *(f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in buckets)]
    return "\n".join([*lines, f"{name}_count {buckets[-1][1]}", f"{name}_sum {total}", ""])


def test_ticks_and_readings_of_the_engine_are_those_since_the_last_lap() -> None:
    pages = [
        histogram(("0.1", 5), ("0.2", 5), ("0.5", 9), ("+Inf", 9), total=2.0)
        + histogram(("0.2", 2), ("+Inf", 3), total=3, name=READINGS),
        histogram(("0.1", 8), ("0.2", 9), ("0.5", 13), ("+Inf", 13), total=3.0)
        + histogram(("0.2", 2), ("+Inf", 5), total=5, name=READINGS),
    ]
    for name, lap in ((TICKS, Ticks(4, 0.25, 0.2, 1.0)), (READINGS, Ticks(2, 1.0, float("inf"), 0.0))):
        answers = iter(pages)
        stack: Any = SimpleNamespace(api=lambda path, answers=answers: Answer(200, {}, next(answers).encode()))
        assert TickBook(stack, name).lap() == lap


def simulated(*, ready_after_s: str) -> Result:
    autoscale = autoscale_step.autoscale_of(ROOT / autoscale_step.APP)
    times = [number / 8 for number in range(160)] + [20 + number / 144 for number in range(144 * 60)]
    trace = Trace("step", times, 80.0, steps=(Step(20.0, 8, 144),))
    setting = Setting(parse_distribution("", "0.25"), parse_distribution("", ready_after_s))
    return simulate(replace(service("sleeper", route="/sleeper"), autoscale=autoscale), trace, setting)


STEADY = "decisions in the 50 s of steady noisy load after that"


@pytest.mark.parametrize(
    ("slowest_s", "messages", "broken"),
    [
        (4.0, ["sleeper: 5 -> 6 replicas: a burst: 36.0 requests", "something else"], []),
        (1.0, [], ["load x 10: 5 replicas take traffic"]),
        (4.0, ["sleeper: 5 -> 6 replicas: more", "sleeper: 6 -> 5 replicas: less"], [STEADY]),
    ],
)
def test_what_a_step_promises(slowest_s: float, messages: list[str], broken: list[str]) -> None:
    result = simulated(ready_after_s="4")
    later = autoscale_step.decisions([{"message": message} for message in messages])
    run = autoscale_step.Found(result, summarise(result), [Start(0.0, 0.5, slowest_s)], later, 50.0)
    assert [line.what for line in autoscale_step.lines(run) if not line.met] == broken
