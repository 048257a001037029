"""The load that vLLM's scheduler reports, and vLLM's own metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pierhead.llm.server.engine import EngineStats
from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import StatLoggerBase


class Figures:
    """The scheduler's last report, and how many tokens it has worked through."""

    def __init__(self) -> None:
        self._running = 0
        self._kv_use = 0.0
        self._tokens = 0

    def logger(self, config: Any, engine_index: int = 0) -> StatLoggerBase:
        """vLLM's factory of loggers: one for each of its engines."""
        return _FigureLogger(config, engine_index, self)

    def note(self, scheduler: Any, iteration: Any) -> None:
        """After each of the engine's steps."""
        if scheduler is not None:
            self._running = scheduler.num_running_reqs
            self._kv_use = scheduler.kv_cache_usage
        if iteration is not None:
            self._tokens += iteration.num_generation_tokens + iteration.num_prompt_tokens

    def load(self, unfinished: int) -> EngineStats:
        """`unfinished`: requests that the engine was given and has not ended."""
        running = min(self._running, unfinished)
        return EngineStats(running, unfinished - running, self._kv_use if unfinished else 0.0, self._tokens)


class _FigureLogger(StatLoggerBase):  # type: ignore[misc]
    def __init__(self, config: Any, engine_index: int = 0, figures: Figures | None = None) -> None:
        self._figures = figures or Figures()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
        self._figures.note(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        pass


class OwnMetrics:
    """The part of the process's metrics that is vLLM's."""

    def collect(self) -> Iterable[Any]:
        """Called at scrape."""
        return (metric for metric in REGISTRY.collect() if metric.name.startswith("vllm:"))
