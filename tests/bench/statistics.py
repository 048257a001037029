"""From samples to figures: medians over rounds, ratios round by round, both with their spread. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.bench.samples import Footprint, Sample


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None where there are no values."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1], len(found)) if found else None


Figure = Callable[[Sample], float | None]


def rate(sample: Sample) -> float | None:
    """Good answers a second."""
    return sample.rate


def latency(percentile: str) -> Figure:
    """A percentile of the latency in ms."""
    return lambda sample: sample.latency_ms.get(percentile)


def first(percentile: str) -> Figure:
    """A percentile of the time to the first event in ms."""
    return lambda sample: sample.first_ms.get(percentile)


OWN_WORK = ("haproxy", "ingress", "child")
"""The roles that a request is for; what other roles use is overhead."""


def cpu(sample: Sample) -> float | None:
    """CPU microseconds of a request on the whole machine, the load generator's apart."""
    return sum(us for role, us in sample.cpu_us.items() if role != "generator") if sample.cpu_us else None


def outside(sample: Sample) -> float | None:
    """The share of `cpu` that is spent outside HAProxy, ingress and child."""
    whole = cpu(sample)
    return 1 - sum(sample.cpu_us.get(role, 0.0) for role in OWN_WORK) / whole if whole else None


def tail(sample: Sample) -> float | None:
    """P99 by p50."""
    half, slow = (sample.latency_ms.get(percentile) for percentile in ("p50", "p99"))
    return slow / half if half and slow else None


@dataclass(frozen=True)
class Samples:
    """The samples of a run, asked by what was measured."""

    all: Sequence[Sample]

    def of(self, subject: str, app: str, load: str, level: int = 0) -> list[Sample]:
        """One for each round in which it could be measured, in the order of the rounds.

        Of an open loop only those at the last rate: the first round's may have been taken before the rate was known.
        """
        found = [s for s in self.all if (s.subject, s.app, s.load, s.level) == (subject, app, load, level)]
        if load == "open":
            last = [s.offered_rate for s in self.all if s.app == app and s.load == "open"][-1:]
            found = [sample for sample in found if [sample.offered_rate] == last]
        return sorted(found, key=lambda sample: sample.round)

    def levels(self, app: str, load: str, subject: str = "ours") -> list[int]:
        """Which levels were measured."""
        return sorted({s.level for s in self.all if (s.subject, s.app, s.load) == (subject, app, load)})

    def by_round(self, figure: Figure, subject: str, app: str, load: str, level: int = 0) -> dict[int, float]:
        """A figure of each round that has it."""
        values = {sample.round: figure(sample) for sample in self.of(subject, app, load, level)}
        return {number: value for number, value in values.items() if value is not None}

    def spread(self, figure: Figure, subject: str, app: str, load: str, level: int = 0) -> Spread | None:
        """Median and spread of a figure."""
        return Spread.of(self.by_round(figure, subject, app, load, level).values())

    def ratio(
        self, figure: Figure, subject: str, other: str, app: str, load: str, level: int = 0, other_load: str = ""
    ) -> Spread | None:
        """`subject` divided by `other`, round by round: what a round did to both cancels out."""
        above = self.by_round(figure, subject, app, load, level)
        below = self.by_round(figure, other, app, other_load or load, level)
        return Spread.of(above[number] / below[number] for number in above.keys() & below.keys() if below[number])

    def errors(self, subject: str, app: str, load: str, level: int = 0) -> dict[str, int]:
        """Errors of all rounds by kind."""
        total: dict[str, int] = {}
        for sample in self.of(subject, app, load, level):
            for kind, count in sample.errors.items():
                total[kind] = total.get(kind, 0) + count
        return total

    def costs(self, subject: str, app: str, load: str, level: int = 0) -> dict[str, float]:
        """CPU microseconds of a request by role, each the median over rounds."""
        return _medians([sample.cpu_us for sample in self.of(subject, app, load, level)])


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row})
    return {name: statistics.median([row.get(name, 0.0) for row in rows]) for name in names}


def resident(footprints: Iterable[Footprint], subject: str, chain: str, when: str, key: str) -> dict[str, float]:
    """Memory by role in MB, each the median over rounds; `key` is one of processes.Memory's."""
    rows = [
        {role: found[key] for role, found in footprint.roles.items()}
        for footprint in footprints
        if (footprint.subject, footprint.chain, footprint.when) == (subject, chain, when)
    ]
    return _medians(rows)
