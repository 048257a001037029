"""The gateway's metrics. `target` is the LLM service: `service`, as on every metric, is the gateway's own.

Text that clients can invent is no label: a model that is not in the map is counted as "". An adapter's name becomes a
label only once a service has answered for it, up to a limit.
"""

from __future__ import annotations

from collections.abc import Iterator

from pierhead.metrics import SECONDS, Counter, Histogram, ReadGauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

MAX_ADAPTERS = 1000
"""Most adapters that become labels; further ones are counted under the base model's name."""

FINISH_REASONS = frozenset(
    ("", "stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "repetition")
)


class GatewayMetrics(Collector):
    """Plain additions on the path of a request; Prometheus objects at scrape."""

    def __init__(self) -> None:
        of_model = ("model", "target")
        self.first_token = Histogram(
            "pierhead_llm_time_to_first_token_seconds",
            "From a request's arrival to its first token, of streams.",
            of_model,
            SECONDS,
        )
        self.per_token = Histogram(
            "pierhead_llm_time_per_output_token_seconds",
            "Time between tokens after the first, of streams; one value per request.",
            of_model,
            SECONDS,
        )
        self.request = Histogram(
            "pierhead_llm_request_seconds", "From a request's arrival to the end of its answer.", of_model, SECONDS
        )
        self.tokens = Counter(
            "pierhead_llm_tokens_total",
            "Tokens used; the prompts of requests that ended before the engine had counted, by estimate.",
            (*of_model, "kind", "key"),
        )
        self.requests = Counter(
            "pierhead_llm_requests_total", "Requests answered.", (*of_model, "key", "code", "finish_reason")
        )
        self.prefill = Counter(
            "pierhead_llm_prefill_total",
            "Requests for models with a prefill service: done, nothing_to_hand_over, no_replica, unavailable, "
            "several_choices (the last four: decode did the whole), error.",
            (*of_model, "outcome"),
        )
        self.bodies = ReadGauge(
            "pierhead_llm_bodies_bytes", "Bodies of the requests that wait for the beginning of their answer."
        )
        self._adapters: set[str] = set()

    def model_label(self, model: str, base: str, *, known: bool) -> str:
        """The label of a model or adapter. `known`: a service has answered for it."""
        if model == base or model in self._adapters:
            return model
        if not known or len(self._adapters) >= MAX_ADAPTERS:
            return base
        self._adapters.add(model)
        return model

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at scrape."""
        for metric in vars(self).values():
            if isinstance(metric, Counter | ReadGauge | Histogram):
                yield metric.collect((), ())


def finish_label(reason: str) -> str:
    """A finish reason as a label."""
    return reason if reason in FINISH_REASONS else "other"
