"""The metrics of all workers as the page of one replica. Pure.

Counters and histograms are added up, those of workers that have ended included: a total never goes down. Gauges are
added up over the workers that live, but for what is no amount: of those the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

NO_AMOUNTS = ("_lag_seconds", "_timestamp_seconds", "_info", "_created", "_ratio")
"""How gauges end that it makes no sense to add up."""

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""


@dataclass(slots=True)
class Family:
    """One metric: its samples in the order in which they first came."""

    name: str
    kind: str
    documentation: str
    samples: dict[Key, float] = field(default_factory=dict)

    @property
    def only_grows(self) -> bool:
        """Whether what a worker has counted stays counted when it ends."""
        return self.kind in ("counter", "histogram", "summary")

    def add(self, other: Family) -> None:
        """Take in the samples of another worker's family of the same name."""
        largest = not self.only_grows and self.name.endswith(NO_AMOUNTS)
        for key, value in other.samples.items():
            known = self.samples.get(key)
            if known is None:
                self.samples[key] = value
            elif largest or "quantile" in dict(key[1]):
                self.samples[key] = max(known, value)
            else:
                self.samples[key] = known + value


Page = dict[str, Family]


def read_page(text: str) -> Page:
    """What a worker exposes. Raises ValueError when it is no exposition."""
    return {
        family.name: Family(
            family.name,
            family.type,
            family.documentation,
            {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in family.samples},
        )
        for family in text_string_to_metric_families(text)
    }


class Ledger:
    """The last page of every worker that lives, and what those that have ended have counted."""

    def __init__(self) -> None:
        self._living: dict[int, Page] = {}
        self._past: Page = {}

    def update(self, worker: int, page: Page) -> None:
        """What a worker exposes now; `worker` is another number for each process."""
        self._living[worker] = page

    def retire(self, worker: int) -> None:
        """A worker has ended: its counts stay, its gauges go."""
        page = self._living.pop(worker, {})
        _add(self._past, (family for family in page.values() if family.only_grows))

    def page(self, own: Mapping[str, float], labels: Mapping[str, str]) -> bytes:
        """The whole replica's exposition. `own`: what the supervisor knows better, by a name out of OWN."""
        whole: Page = {}
        for page in (self._past, *self._living.values()):
            _add(whole, page.values())
        key = tuple(sorted(labels.items()))
        for name, value in own.items():
            kind, documentation = OWN[name]
            sample = f"{name}_total" if kind == "counter" else name
            whole[name] = Family(name, kind, documentation, {(sample, key): value})
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Whole(whole))
        return generate_latest(registry)


OWN = {
    "pierhead_ongoing_requests": ("gauge", "Requests this replica works on now."),
    "pierhead_replica_ready": ("gauge", "1 while this replica says that it is ready, else 0."),
    "pierhead_workers_ready": ("gauge", "Processes of this replica that are ready."),
    "pierhead_worker_ends": ("counter", "Processes of this replica that have ended without being told to."),
}
"""Name -> kind and documentation."""


def _add(page: Page, families: Iterable[Family]) -> None:
    for family in families:
        known = page.get(family.name)
        if known is None:
            page[family.name] = Family(family.name, family.kind, family.documentation, dict(family.samples))
        else:
            known.add(family)


class _Whole(Collector):
    def __init__(self, page: Page) -> None:
        self._page = page

    def collect(self) -> Iterator[Metric]:
        for family in self._page.values():
            metric = Metric(family.name, family.documentation, family.kind)
            for (name, labels), value in family.samples.items():
                metric.add_sample(name, dict(labels), value)
            yield metric
