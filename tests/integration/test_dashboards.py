"""Every panel of the overview against the running stack's Prometheus: each query must find data.

Those of Triton need one: tests/e2e/test_triton.py.
"""

from __future__ import annotations

import pytest

from dashboards import build_overview
from tests.harness.prometheus import Prometheus, queries_of, traffic
from tests.harness.stack import Stack
from tests.harness.waiting import eventually
from tests.unit.dashboards.sources import HAPROXY

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]


@pytest.fixture
def prometheus(stack: Stack) -> Prometheus:
    return Prometheus(stack)


def test_every_panel_has_data(stack: Stack, prometheus: Prometheus) -> None:
    def ask() -> None:
        for path in ("/echo?message=x", "/recsys/?user_id=1"):
            stack.get(path)

    with traffic(ask):
        sections = [section for section in build_overview.SECTIONS if section is not build_overview.TRITON]
        prometheus.wait_for_data(queries_of(sections))


def test_every_job_is_up(prometheus: Prometheus) -> None:
    for job in ("prometheus", "controller", "haproxy", "replicas"):
        expr = f'up{{job="{job}"}}'
        eventually(lambda: min(prometheus.numbers(expr)) == 1, f"every target of {job} is up")  # noqa: B023


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


def test_a_replica_that_is_ready_becomes_a_target(stack: Stack, prometheus: Prometheus) -> None:
    stack.scale("echo", 2)  # returns when it is ready
    replicas = stack.replicas("echo").keys()
    eventually(lambda: {prometheus.target_health()[name] for name in replicas} == {"up"}, "both are scraped")
