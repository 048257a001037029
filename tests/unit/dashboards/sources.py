"""Who exports which metrics: the names that panels and rules may use."""

from __future__ import annotations

from pierhead.metrics import RuntimeMetrics

from controller.metrics import ControllerMetrics
from tests.unit.dashboards.promql import exported_names

HAPROXY = {
    "haproxy_backend_active_servers",
    "haproxy_backend_current_queue",
    "haproxy_backend_http_requests_total",
    "haproxy_backend_http_responses_total",
    "haproxy_backend_redispatch_warnings_total",
    "haproxy_backend_retry_warnings_total",
    "haproxy_server_current_queue",
    "haproxy_server_current_sessions",
}
"""The part of HAProxy's exporter that we use; test_dashboards.py asks the real one for them."""

PROMETHEUS = {"up", "ALERTS"}
"""What Prometheus makes itself."""


def runtime() -> set[str]:
    """Names on a managed replica's metrics page."""
    return exported_names(RuntimeMetrics().collect())


def controller() -> set[str]:
    """Names on the controller's metrics page."""
    return exported_names(ControllerMetrics().registry.collect())


def everything() -> set[str]:
    """All of them."""
    return HAPROXY | PROMETHEUS | runtime() | controller()
