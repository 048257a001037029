"""The running stack's Prometheus, asked as Grafana asks it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from dashboards.panels import Section
from tests.harness.stack import Stack, request
from tests.harness.waiting import eventually


def queries_of(sections: Sequence[Section]) -> dict[str, str]:
    """The queries of a page's sections, by their names."""
    return {
        f"{section.title}: {panel.title}: {query.legend}": query.expr
        for section in sections
        for panel in section.panels
        for query in panel.queries
    }


@contextlib.contextmanager
def traffic(ask: Callable[[], object]) -> Iterator[None]:
    """Within: `ask` is called again and again, in a thread of its own."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.1):
            ask()

    asking = threading.Thread(target=run)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()


class Prometheus:
    """One stack's."""

    def __init__(self, stack: Stack) -> None:
        self._url = f"http://127.0.0.1:{stack.ports['PIERHEAD_PROMETHEUS_PORT']}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        answer = request(f"{self._url}/{path}?{urlencode(parameters)}")
        assert answer.status == 200, answer.body
        return answer.json["data"]

    def labels(self, expr: str) -> list[dict[str, str]]:
        """The label sets that a query finds now; Grafana's variables are given values it would give them."""
        return [sample["metric"] for sample in self._samples(expr)]

    def numbers(self, expr: str) -> list[float]:
        """The values of a query that are numbers: 0/0 is a sample, but nothing to look at."""
        values = [float(sample["value"][1]) for sample in self._samples(expr)]
        return [value for value in values if not math.isnan(value)]

    def wait_for_data(self, queries: Mapping[str, str]) -> None:
        """Wait until every one of these queries, by name, has found a number."""
        missing = dict(queries)

        def has_all() -> bool:
            for name in [name for name, expr in missing.items() if self.numbers(expr)]:
                del missing[name]
            assert not missing, f"no data for {missing}"
            return True

        eventually(has_all, "every query has found data", within_s=120)

    def target_health(self) -> dict[str, str]:
        """Health ("up", "down", "unknown") of the replicas that are targets now, by replica."""
        targets = self.get("targets", state="active", scrapePool="replicas")["activeTargets"]
        return {target["labels"]["replica"]: target["health"] for target in targets}

    def _samples(self, expr: str) -> list[dict[str, Any]]:
        for variable, value in (("$service", ".+"), ("$__rate_interval", "30s")):
            expr = expr.replace(variable, value)
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found
