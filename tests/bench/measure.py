"""One visit: the loads of one subject, with what they cost. Everything here is seen from outside the subject."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.bench.cases import APPS, WARM_S, WAYS, Step, Visit
from tests.bench.load import tools
from tests.bench.load.tools import Outcome
from tests.bench.processes import BenchError, MachineTime, cpu_seconds, memory
from tests.bench.samples import Footprint, Sample
from tests.bench.systems import elsewhere
from tests.bench.systems.running import Running, Workplace


@dataclass(frozen=True, slots=True)
class Meter:
    """CPU seconds so far of everything that matters to one measurement."""

    at: float
    by_role: dict[str, float]
    generator: float
    machine: MachineTime
    bench: float

    @classmethod
    def read(cls, running: Running | None) -> Meter:
        """Look at all of it now. `running`: None where the load is the subject itself."""
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(
            at=time.monotonic(),
            by_role=cpu_seconds(running.members()) if running else {},
            generator=children.ru_utime + children.ru_stime,
            machine=MachineTime.now(),
            bench=own.ru_utime + own.ru_stime,
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time between two readings."""

    us: dict[str, float]
    """Microseconds of one request, by role; all of them together are the whole machine's."""
    rest_cores: float
    stolen_cores: float


def cost(before: Meter, after: Meter, requests: int) -> Cost:
    """What all processes and the kernel used, the bench's own readings apart.

    The kernel's work for a packet counts where it is done: mostly in the process that sends or receives it.
    """
    span = after.at - before.at
    used = {role: max(0.0, seconds - before.by_role.get(role, 0.0)) for role, seconds in after.by_role.items()}
    used["generator"] = after.generator - before.generator
    machine = after.machine.busy - before.machine.busy - (after.bench - before.bench)
    used["rest"] = max(0.0, machine - sum(used.values()))
    return Cost(
        us={role: 1e6 * seconds / max(1, requests) for role, seconds in used.items()},
        rest_cores=used["rest"] / span,
        stolen_cores=(after.machine.stolen - before.machine.stolen) / span,
    )


def footprint(visit: Visit, running: Running, when: str) -> Footprint:
    """Memory of the subject now."""
    roles = {
        role: {
            "processes": found.processes,
            "rss_mb": found.rss_mb,
            "pss_mb": found.pss_mb,
            "largest_rss_mb": found.largest_rss_mb,
        }
        for role, found in memory(running.members()).items()
    }
    return Footprint(visit.round, visit.subject.key, visit.chain, when, roles)


def measure(
    work: Workplace,
    visit: Visit,
    step: Step,
    running: Running | None,
    offered_rate: float = 0.0,
    answer_bytes: int = 0,
) -> Sample:
    """Warm up, load, read the meters. `offered_rate`: of an open loop. Raises BenchError when a load cannot be run."""
    warm, load = _loads(work, step, running, offered_rate)
    warm()
    before = Meter.read(running)
    outcome = load()
    cpu = cost(before, Meter.read(running), outcome.worked_on)
    errors = dict(outcome.errors)
    if step.load in WAYS and outcome.requests and outcome.bytes_each < answer_bytes and not errors:
        errors["short answers"] = outcome.requests
    failed = sum(errors.values())
    return Sample(
        round=visit.round,
        subject=visit.subject.key,
        app=step.app,
        load=step.load,
        level=step.level,
        seconds=round(outcome.seconds, 3),
        requests=outcome.requests,
        rate=round(max(0, outcome.requests - failed) / outcome.seconds, 2),
        latency_ms=_rounded(outcome.latency_ms),
        errors=errors,
        offered_rate=round(offered_rate, 2),
        first_ms=_rounded(outcome.first_ms) if step.app == "stream" else {},
        histogram=outcome.histogram if step.load == "open" else "",
        lag_p99_ms=outcome.lag_p99_ms,
        cpu_us=_rounded(cpu.us),
        rest_cores=round(cpu.rest_cores, 4),
        stolen_cores=round(cpu.stolen_cores, 4),
    )


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in sorted(values.items())}


def _loads(
    work: Workplace, step: Step, running: Running | None, rate: float
) -> tuple[Callable[[], object], Callable[[], Outcome]]:
    """The warm-up and the load of a step."""
    seconds, warm = step.seconds, WARM_S.get(step.load, 1.0)
    if step.load == "model":
        threads = step.level or (os.cpu_count() or 1)
        return _nothing, lambda: tools.model_alone(work.python, threads, seconds, work.device)
    if running is None:
        raise BenchError(f"a load of kind {step.load} needs something that runs")
    url = running.ways.get(step.load, running.url) + APPS[step.app].path
    if step.load in WAYS:
        there = elsewhere.COMMAND if step.load == "remote" else ()

        def wrk(seconds: float) -> Outcome:
            return tools.wrk(url, step.level, seconds, there, running.headers)

        return lambda: wrk(warm), lambda: wrk(seconds)
    if step.load == "first":
        return _nothing, lambda: tools.closed_loop(tools.OWN_PYTHON, url, step.level, seconds, warm)
    return _nothing, lambda: tools.open_loop(tools.OWN_PYTHON, url, rate, seconds, warm)


def _nothing() -> None:
    """A load that warms up by itself."""
