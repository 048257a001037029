"""Who exports which metrics: the names that panels and rules may use."""

from __future__ import annotations

from pathlib import Path

from pierhead.llm.gateway.metrics import GatewayMetrics
from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.server.engine import EngineStats
from pierhead.llm.server.exposition import show
from pierhead.llm_config import LLMConfig, ModelLoading
from pierhead.metrics import RuntimeMetrics
from prometheus_client.parser import text_string_to_metric_families

from controller.status.metrics import ControllerMetrics
from tests.unit.dashboards.promql import exported_names

VLLM_PAGE = Path(__file__).parent / "vllm-0.32.0.txt"
"""What a vLLM tells of itself before its first request; test_llm_prefill.py asks the one that is installed."""

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

ALERTMANAGER = {"alertmanager_notification_requests_failed_total"}
"""The part of Alertmanager's metrics that we use; tests/contract/test_alertmanager.py asks a real one for it."""

TRITON = {
    "nv_gpu_utilization",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_queue_duration_us",
    "nv_inference_request_failure",
    "nv_inference_request_success",
}
"""The part of Triton's metrics that we use; tests/e2e/test_triton.py asks a real one for them."""

PROMETHEUS = {
    "ALERTS",
    "prometheus_target_scrape_pool_exceeded_label_limits_total",
    "prometheus_target_scrapes_exceeded_body_size_limit_total",
    "prometheus_target_scrapes_exceeded_sample_limit_total",
    "up",
}
"""What Prometheus makes itself; test_prometheus.py makes it count what is beyond a limit."""


def runtime() -> set[str]:
    """Names on a managed replica's metrics page."""
    return exported_names(RuntimeMetrics().collect())


def controller() -> set[str]:
    """Names on the controller's metrics page."""
    return exported_names(ControllerMetrics().registry.collect())


def llm_gateway() -> set[str]:
    """Names that an LLM gateway adds to its replica's."""
    return exported_names(GatewayMetrics().collect())


def llm_server() -> set[str]:
    """Names that an LLM server with the mock engine adds to its replica's."""
    metrics = RuntimeMetrics()
    engine = MockEngine(LLMConfig(model_loading=ModelLoading(model_id="demo"), engine="mock"))
    show(metrics, EngineStats, engine.expose)
    return exported_names(text_string_to_metric_families(metrics.expose().decode())) - runtime()


def vllm() -> set[str]:
    """Names that vLLM adds there."""
    return exported_names(text_string_to_metric_families(VLLM_PAGE.read_text(encoding="utf-8")))


def everything() -> set[str]:
    """All of them."""
    return (
        HAPROXY | PROMETHEUS | ALERTMANAGER | TRITON | runtime() | controller() | llm_gateway() | llm_server() | vllm()
    )
