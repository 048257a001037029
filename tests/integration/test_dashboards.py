"""Every panel of the overview against the running stack's Prometheus: each query must find data."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from dashboards.build_overview import SECTIONS
from tests.harness.stack import Stack, request
from tests.harness.waiting import eventually, seconds_until
from tests.unit.dashboards.sources import HAPROXY

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

QUERIES = [
    pytest.param(query.expr, id=f"{section.title}: {panel.title}: {query.legend}")
    for section in SECTIONS
    for panel in section.panels
    for query in panel.queries
]
SCRAPE_INTERVAL_S = 5.0


class Prometheus:
    """The running stack's Prometheus, asked as Grafana asks it."""

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

    def target_health(self) -> dict[str, str]:
        """Health ("up", "down", "unknown") of the replicas that are targets now, by replica."""
        targets = self.get("targets", state="active", scrapePool="replicas")["activeTargets"]
        return {target["labels"]["replica"]: target["health"] for target in targets}

    def _samples(self, expr: str) -> list[dict[str, Any]]:
        for variable, value in (("$service", ".+"), ("$__rate_interval", "30s")):
            expr = expr.replace(variable, value)
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found


@pytest.fixture(scope="module")
def prometheus(running_stack: Stack) -> Prometheus:
    return Prometheus(running_stack)


@pytest.fixture(scope="module")
def _traffic(running_stack: Stack) -> Iterator[None]:
    """A few requests a second to every app, for as long as the tests look."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.1):
            for path in ("/echo?message=x", "/recsys/?user_id=1"):
                running_stack.get(path)

    asking = threading.Thread(target=ask)
    asking.start()
    yield
    over.set()
    asking.join()


@pytest.mark.usefixtures("_traffic")
@pytest.mark.parametrize("expr", QUERIES)
def test_a_panel_has_data(prometheus: Prometheus, expr: str) -> None:
    eventually(lambda: prometheus.numbers(expr), f"data for {expr}")


@pytest.mark.parametrize("job", ["prometheus", "controller", "haproxy", "replicas"])
def test_every_job_is_up(prometheus: Prometheus, job: str) -> None:
    eventually(lambda: min(prometheus.numbers(f'up{{job="{job}"}}')) == 1, f"every target of {job} is up")


def test_the_real_haproxy_exports_what_panels_and_alerts_ask_of_it(prometheus: Prometheus) -> None:
    exported = set(prometheus.get("label/__name__/values", **{"match[]": '{job="haproxy"}'}))
    assert exported >= HAPROXY


def test_haproxys_series_name_service_and_replica(stack: Stack, prometheus: Prometheus) -> None:
    (replica,) = stack.replicas("echo")
    expr = f'haproxy_server_status{{service="echo", replica="{replica}", state="UP"}} == 1'
    eventually(lambda: prometheus.numbers(expr), f"{replica} is up in HAProxy")


def test_a_replicas_series_carry_the_controllers_labels_and_no_second_set(stack: Stack, prometheus: Prometheus) -> None:
    (replica,) = stack.replicas("echo")
    expr = f'pierhead_ongoing_requests{{replica="{replica}"}}'
    (labels, *others) = eventually(lambda: prometheus.labels(expr), f"a sample of {replica}")
    assert not others
    assert labels["service"] == "echo"
    assert labels["instance"] == replica
    assert labels["version"] in replica
    assert not [label for label in labels if label.startswith("exported_")]


def test_a_replica_is_a_target_within_a_scrape_interval_of_being_ready(stack: Stack, prometheus: Prometheus) -> None:
    before = stack.replicas("ranker").keys()
    stack.scale("ranker", len(before) + 1)  # returns when it is ready
    (added,) = stack.replicas("ranker").keys() - before
    took = seconds_until(lambda: added in prometheus.target_health(), f"{added} is a target")
    assert took <= SCRAPE_INTERVAL_S
    eventually(lambda: prometheus.target_health()[added] == "up", f"{added} is scraped")
