"""Every panel of the overview against the running stack's Prometheus: each query must find data."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dashboards import build_overview
from tests.harness.machine import Pace, judge
from tests.harness.prometheus import Prometheus, queries_of
from tests.harness.stack import Stack
from tests.harness.waiting import eventually, seconds_until
from tests.unit.dashboards.sources import HAPROXY

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

SCRAPE_INTERVAL_S = 5.0


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
@pytest.mark.parametrize("expr", queries_of(build_overview.SECTIONS))
def test_a_panel_has_data(prometheus: Prometheus, expr: str) -> None:
    eventually(lambda: prometheus.numbers(expr), f"data for {expr}", within_s=120)


@pytest.mark.parametrize("job", ["prometheus", "controller", "haproxy", "replicas"])
def test_every_job_is_up(prometheus: Prometheus, job: str) -> None:
    eventually(lambda: min(prometheus.numbers(f'up{{job="{job}"}}')) == 1, f"every target of {job} is up")


def test_the_real_haproxy_exports_what_panels_and_alerts_ask_of_it(prometheus: Prometheus) -> None:
    def missing() -> set[str]:
        return HAPROXY - set(prometheus.get("label/__name__/values", **{"match[]": '{job="haproxy"}'}))

    eventually(lambda: not missing(), f"HAProxy exports all of {HAPROXY}")


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
    with Pace() as pace:
        took = seconds_until(lambda: added in prometheus.target_health(), f"{added} is a target")
    eventually(lambda: prometheus.target_health()[added] == "up", f"{added} is scraped")
    judge(took <= SCRAPE_INTERVAL_S, f"a target within {SCRAPE_INTERVAL_S:g} s, and it was {took:.1f} s", pace)
