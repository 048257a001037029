"""Reads each service's traffic from Prometheus: one query with a time limit, and no numbers where it does not answer.

The numbers are those of the dashboard: request rates and quantiles as counted by the replicas; for an image without
metrics, HAProxy's rate and no quantiles.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import queue
import threading
import urllib.error
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .project.direct import is_address, opened, reason

STACK_URL = "http://prometheus:9090"
"""Its name on the controller's network."""
TIMEOUT_S = 2.0

_DURATIONS = "pierhead_request_duration_seconds_bucket"


@dataclass(frozen=True, slots=True)
class ServiceTraffic:
    """One service: requests per second, and quantiles of their durations in seconds. None = not known."""

    rate: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class QueryResult:
    """One answer; `problem` is why there is none."""

    services: Mapping[str, ServiceTraffic] = field(default_factory=dict)
    problem: str = ""

    def of(self, service: str) -> ServiceTraffic:
        """Return a service's traffic."""
        return self.services.get(service, ServiceTraffic())


def address() -> str:
    """Return the address: PIERHEAD_PROMETHEUS_URL, else the stack's own; "" where the stack is on another machine."""
    named = os.environ.get("PIERHEAD_PROMETHEUS_URL")
    if named is not None:
        return named.rstrip("/")
    return "" if os.environ.get("PIERHEAD_API_URL") else STACK_URL


def expression(window: str) -> str:
    """Return the query: series of (service, what) with what = rate, p50_s or p99_s."""
    replicas = _rate("service", "pierhead_requests_total", window)
    edge = _rate("service", "haproxy_backend_http_requests_total", window)
    by_bound = _rate("le, service", _DURATIONS, window)
    parts = {
        "rate": f"({replicas} or {edge})",
        "p50_s": f"histogram_quantile(0.5, {by_bound})",
        "p99_s": f"histogram_quantile(0.99, {by_bound})",
    }
    return " or ".join(f'label_replace({part}, "what", "{what}", "", "")' for what, part in parts.items())


def read(url: str, window: str = "1m", timeout_s: float = TIMEOUT_S) -> QueryResult:
    """Ask once; return within about `timeout_s` seconds, whatever the network does."""
    if not url:
        return QueryResult(problem="PIERHEAD_PROMETHEUS_URL does not say where Prometheus is")
    if not is_address(url):
        return QueryResult(problem=f"PIERHEAD_PROMETHEUS_URL: expected http://host:port, found {url!r}")
    # A socket's timeout does not cover the look-up of the name. The thread ends with the process at the latest.
    answers: queue.SimpleQueue[QueryResult] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_ask(url, window, timeout_s)), daemon=True).start()
    try:
        return answers.get(timeout=timeout_s + 0.5)
    except queue.Empty:
        return QueryResult(problem=f"Prometheus did not answer at {url} within {timeout_s:g} s")


def parse(document: Any) -> QueryResult:
    """Read the answer of /api/v1/query. Raises KeyError, TypeError or ValueError for anything else."""
    services: dict[str, ServiceTraffic] = {}
    for series in document["data"]["result"]:
        service, what, value = series["metric"]["service"], series["metric"]["what"], float(series["value"][1])
        if what not in ("rate", "p50_s", "p99_s"):
            raise ValueError(what)
        if math.isfinite(value):
            services[service] = replace(services.get(service, ServiceTraffic()), **{what: value})
    return QueryResult(services)


def _rate(by: str, counter: str, window: str) -> str:
    return f'sum by ({by}) (rate({counter}{{service!=""}}[{window}]))'


def _ask(url: str, window: str, timeout_s: float) -> QueryResult:
    target = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression(window)})}"
    try:
        with opened(target, timeout_s) as response:
            return parse(json.load(response))
    except urllib.error.HTTPError as error:
        with error:
            return QueryResult(problem=f"Prometheus at {url} answered {error.code}")
    except (OSError, http.client.HTTPException) as error:
        return QueryResult(problem=f"Prometheus does not answer at {url} ({reason(error)})")
    except (ValueError, KeyError, TypeError, IndexError):
        return QueryResult(problem=f"{url} is not Prometheus: its answer cannot be read")
