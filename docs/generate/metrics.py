"""The page of metrics, made of the collectors themselves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pierhead.llm.gateway.metrics import GatewayMetrics
from pierhead.metrics import RuntimeMetrics
from prometheus_client.core import Metric

from controller.status.metrics import ControllerMetrics
from docs.generate.markdown import cell

ABOUT = """\
# Metrics

Prometheus scrapes HAProxy, the controller and every replica, from its start on. Histograms have the suffixes
`_bucket`, `_sum` and `_count`. HAProxy's own metrics (`haproxy_...`) are those of its exporter, on port 8404.
"""
RUNTIME = """
## Replicas

All carry `service` and `replica`. `method` is a gRPC method or a route as declared (`GET /items/{id}`), never a path;
`target` is the service that is called. A service adds its own with `pierhead.metrics.PROCESS.register(collector)`.
"""
CONTROLLER = """
## The controller
"""
GATEWAY = """
## The LLM gateway

`target` is the LLM service (`service` and `replica` are the gateway's own), `key` the name of the API key.
"""
OF_EVERY_REPLICA = ("service", "replica")


def page(root: Path) -> str:
    """Return the whole page."""
    return "".join(
        [
            ABOUT,
            RUNTIME,
            _table(RuntimeMetrics().collect()),
            CONTROLLER,
            _table(ControllerMetrics().registry.collect()),
            GATEWAY,
            _table(GatewayMetrics().collect()),
        ]
    )


def _table(families: Iterable[Metric]) -> str:
    rows = ["\n| name | kind | labels | |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda each: each.name):
        if not family.name.startswith("pierhead_"):
            continue
        labels = [name for name in getattr(family, "_labelnames", ()) if name not in OF_EVERY_REPLICA]
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append(f"| `{name}` | {family.type} | {', '.join(labels)} | {cell(family.documentation)} |")
    return "\n".join(rows) + "\n"
