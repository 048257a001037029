"""One visit: the loads of one subject, with what they cost. Everything here is seen from outside the subject."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pierhead.echo.v1.echo_pb2 import EchoReply, EchoRequest

from tests.bench.cases import APPS, WARM_S, Step, Visit
from tests.bench.load import tools
from tests.bench.load.tools import Outcome
from tests.bench.processes import BenchError, MachineTime, cpu_seconds, memory
from tests.bench.samples import Footprint, Sample
from tests.bench.systems.running import Running, Workplace

ECHO_METHOD = "/pierhead.echo.v1.Echo/Echo"
_ECHO_REPLY_BYTES = len(EchoReply(response="Echo: ").SerializeToString())


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


def cost(before: Meter, after: Meter, requests: int) -> tuple[dict[str, float], dict[str, float], float]:
    """CPU milliseconds per 1,000 requests by role, cores in use by role, cores stolen."""
    span = after.at - before.at
    used = {role: max(0.0, seconds - before.by_role.get(role, 0.0)) for role, seconds in after.by_role.items()}
    used["generator"] = after.generator - before.generator
    machine = after.machine.busy - before.machine.busy
    elsewhere = machine - sum(used.values()) - (after.bench - before.bench)
    per_1000 = {role: 1e6 * seconds / max(1, requests) for role, seconds in used.items()}
    cores = {role: seconds / span for role, seconds in used.items()} | {"elsewhere": max(0.0, elsewhere / span)}
    return per_1000, cores, (after.machine.stolen - before.machine.stolen) / span


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
    return Footprint(visit.round, visit.subject.key, visit.app, when, roles)


def measure(
    work: Workplace,
    visit: Visit,
    step: Step,
    running: Running | None,
    offered_rate: float = 0.0,
    answer_bytes: int = 0,
) -> Sample:
    """Warm up, load, read the meters. `offered_rate`: of an open loop. Raises BenchError when a load cannot be run."""
    warm, load = _loads(work, visit, step, running, offered_rate)
    warm()
    before = Meter.read(running)
    outcome = load()
    per_1000, cores, stolen = cost(before, Meter.read(running), outcome.worked_on)
    errors = dict(outcome.errors)
    if step.load == "closed" and outcome.bytes_each < answer_bytes and not errors:
        errors["short answers"] = outcome.requests
    failed = sum(errors.values())
    return Sample(
        round=visit.round,
        subject=visit.subject.key,
        app=visit.app,
        load=step.load,
        level=step.level,
        seconds=round(outcome.seconds, 3),
        requests=outcome.requests,
        rate=round(max(0, outcome.requests - failed) / outcome.seconds, 2),
        latency_ms=_rounded(outcome.latency_ms),
        errors=errors,
        offered_rate=round(offered_rate, 2),
        first_ms=_rounded(outcome.first_ms) if visit.app == "stream" else {},
        histogram=outcome.histogram if step.load == "open" else "",
        lag_p99_ms=outcome.lag_p99_ms,
        cpu_ms_per_1000=_rounded(per_1000),
        cores=_rounded(cores),
        stolen_cores=round(stolen, 4),
    )


def _rounded(values: object) -> dict[str, float]:
    assert isinstance(values, dict)
    return {name: round(value, 4) for name, value in sorted(values.items())}


def _loads(
    work: Workplace, visit: Visit, step: Step, running: Running | None, rate: float
) -> tuple[Callable[[], object], Callable[[], Outcome]]:
    """The warm-up and the load of a step."""
    seconds, warm = step.seconds, WARM_S[step.load]
    if step.load == "model":
        threads = step.level or (os.cpu_count() or 1)
        return _nothing, lambda: tools.model_alone(work.python, threads, seconds, work.device)
    if running is None:
        raise BenchError(f"a load of kind {step.load} needs something that runs")
    url = running.url + APPS[visit.app].path
    if step.load == "closed":
        return lambda: tools.wrk(url, step.level, warm), lambda: tools.wrk(url, step.level, seconds)
    if step.load == "first":
        return _nothing, lambda: tools.closed_loop(tools.OWN_PYTHON, url, step.level, seconds, warm)
    if step.load == "open":
        return _nothing, lambda: tools.open_loop(tools.OWN_PYTHON, url, rate, seconds, warm)
    return _grpc(running, step, warm)


def _grpc(running: Running, step: Step, warm: float) -> tuple[Callable[[], object], Callable[[], Outcome]]:
    message = EchoRequest(message="").SerializeToString()

    def load(seconds: float) -> Outcome:
        return tools.h2load(running.grpc_address, ECHO_METHOD, message, _ECHO_REPLY_BYTES, step.level, seconds)

    return lambda: load(warm), lambda: load(step.seconds)


def _nothing() -> None:
    """A load that warms up by itself."""


def steps_of(visit: Visit) -> Iterator[tuple[int, Step]]:
    """The visit's steps, numbered from 1."""
    return enumerate(visit.steps, start=1)
