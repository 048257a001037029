"""Adds the engine's metrics to the replica's /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pierhead.llm.server.engine import EngineStats
from pierhead.metrics import ReadGauge, RuntimeMetrics
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Load = Callable[[], EngineStats]


class _Gauges(Collector):
    """pierhead_llm_engine_*: the same for every engine."""

    def __init__(self, metrics: RuntimeMetrics, load: Load) -> None:
        self._metrics = metrics
        self._running = ReadGauge("pierhead_llm_engine_running", "Requests that the engine generates for.")
        self._waiting = ReadGauge("pierhead_llm_engine_waiting", "Requests that wait in the engine to be run.")
        self._kv_use = ReadGauge("pierhead_llm_engine_kv_use", "Share of the key-value cache in use, 0 to 1.")
        self._running.read = lambda: float(load().running)
        self._waiting.read = lambda: float(load().waiting)
        self._kv_use.read = lambda: load().kv_use

    def collect(self) -> Iterator[Metric]:
        """Called at scrape."""
        for gauge in (self._running, self._waiting, self._kv_use):
            yield gauge.collect(("service", "replica"), (self._metrics.service, self._metrics.replica))


def show(metrics: RuntimeMetrics, load: Load, expose: Callable[[], bytes]) -> None:
    """Add the engine's load, and the metrics that it exposes itself, to the replica's."""
    metrics.register(_Gauges(metrics, load))
    metrics.texts.append(expose)
