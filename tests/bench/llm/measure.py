"""Has users ask something that runs, and sees what they saw, what it cost, and how evenly its replicas were used."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.bench.llm.cases import Users
from tests.bench.processes import ROOT, BenchError, MachineTime, cpu_seconds, get
from tests.bench.systems.running import Running

LOOK_S = 0.5
"""How often engines are asked how many requests they have."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    round: int
    part: str
    case: str
    """The subject, the number of replicas, or the workload."""
    variant: str
    """The policy; "" where there is no choice."""
    seconds: float
    tokens: int
    good_tokens: int
    answers: int
    first_mean_ms: float
    first: str
    """Times to the first token: an HdrHistogram, in microseconds, in its own encoding. `whole`: to the last."""
    whole: str
    cpu_s: dict[str, float]
    """CPU seconds by role, `load` the users' own."""
    busy_cores: float
    """Of the whole machine."""
    hit_rate: float | None = None
    """Share of the prompts' tokens that engines had in their caches."""
    in_work: tuple[float, ...] = ()
    """Mean number of requests in each replica's engine."""
    errors: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)


def measure(
    where: tuple[int, str, str, str], running: Running, users: Users, seconds: float, pages: Sequence[str] = ()
) -> Sample:
    """Let `users` ask for as long, or for their answers within it. `where`: round, part, case, variant.

    Raises BenchError.
    """
    command = [
        sys.executable, "-m", "tests.bench.llm.load", running.url, "--model", users.model, "--users", str(users.count),
        "--workload", users.workload, "--tokens", str(users.tokens), "--seconds", str(seconds),
        "--warm-seconds", str(users.warm_s), "--think-seconds", str(users.think_s), "--slow-seconds", str(users.slow_s),
        "--seed", str(where[0]), "--answers", str(users.answers),
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as load:
        too_long = threading.Timer(users.warm_s + seconds + 60, load.kill)
        too_long.start()
        try:
            _expect(load, "begin")
            before, machine = cpu_seconds(running.members()), MachineTime.now()
            engines = Engines(pages)
            with engines:
                _expect(load, "end")
            after, machine_after = cpu_seconds(running.members()), MachineTime.now()
            said = json.loads(_line(load))
        finally:
            too_long.cancel()
            load.kill()
    return Sample(
        *where,
        seconds=said["seconds"],
        tokens=said["tokens"],
        good_tokens=said["good_tokens"],
        answers=said["answers"],
        first_mean_ms=said["first_mean_ms"],
        first=said["first"],
        whole=said["whole"],
        cpu_s={role: round(used - before.get(role, 0.0), 3) for role, used in after.items()},
        busy_cores=(machine_after.busy - machine.busy) / said["seconds"],
        hit_rate=engines.hit_rate(),
        in_work=engines.in_work(),
        errors=said["errors"],
    )


def _line(load: subprocess.Popen[str]) -> str:
    assert load.stdout is not None
    line = load.stdout.readline().strip()
    if not line:
        raise BenchError("tests.bench.llm.load ended too early; what it said stands above")
    return line


def _expect(load: subprocess.Popen[str], word: str) -> None:
    line = _line(load)
    if line != word:
        raise BenchError(f'tests.bench.llm.load: expected the line "{word}", found "{line[:200]}"')


class Engines:
    """Looks at replicas' metrics as long as it is entered."""

    def __init__(self, pages: Sequence[str]) -> None:
        self._pages = pages
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._looks: list[list[dict[str, float]]] = []
        self._failure: BenchError | None = None

    def __enter__(self) -> None:
        if self._pages:
            self._looks.append([_numbers(page) for page in self._pages])
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Raises BenchError where a look has failed: means over a part of the time would be told as of all of it."""
        self._over.set()
        if self._pages:
            self._thread.join()
            if self._failure is not None:
                raise self._failure
            self._looks.append([_numbers(page) for page in self._pages])

    def hit_rate(self) -> float | None:
        """Between the first look and the last."""
        if not self._looks:
            return None
        hits, asked = (
            sum(after[name] - before[name] for before, after in zip(self._looks[0], self._looks[-1], strict=True))
            for name in ("mock:prefix_cache_hits_total", "mock:prefix_cache_queries_total")
        )
        return hits / asked if asked else 0.0

    def in_work(self) -> tuple[float, ...]:
        """Of each replica: mean over the looks."""
        names = ("pierhead_llm_engine_running", "pierhead_llm_engine_waiting")
        rows = [[sum(numbers[name] for name in names) for numbers in look] for look in self._looks]
        return tuple(sum(column) / len(column) for column in zip(*rows, strict=True))

    def _look(self) -> None:
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            try:
                self._looks.append([_numbers(page) for page in self._pages])
            except BenchError as error:
                self._failure = error
                return
            due += LOOK_S


def _numbers(page: str) -> dict[str, float]:
    status, text = get(page, timeout_s=5)
    if status != 200:
        raise BenchError(f"{page}: expected the engine's metrics, found status {status}")
    families = text_string_to_metric_families(text.decode())
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(("pierhead_llm_engine_", "mock:"))
    }
