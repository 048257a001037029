"""The traffic of every service over the last minutes, as Prometheus has counted it: one query of a range.

The numbers are those of the dashboard, which the replicas count; of an image without metrics, HAProxy's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from ..errors import PrometheusError
from ..observe.prometheus import Series
from ..observe.shared import SharedAnswers
from .records.answers import LLMTraffic, ServiceTraffic, Traffic

AskSeries = Callable[[str, float, float, float], Awaitable[Sequence[Series]]]
"""Returns the series of a query from a unix time to another one, so many seconds apart; raises PrometheusError."""

MOST_POINTS = 90
LEAST_STEP_S = 5.0
"""How often Prometheus reads the replicas."""
WINDOW_S = 30
"""Six readings: short enough to follow a change, long enough for a rate."""

_OF_ALL = tuple(name for name in ServiceTraffic.__slots__ if name != "llm")
_DURATIONS = "pierhead_request_duration_seconds_bucket"
_ERRORS = ', code=~"5..|UNKNOWN|INTERNAL|DATA_LOSS|DEADLINE_EXCEEDED"'
"""Answers that are errors of the service: HTTP status, or the name of a gRPC status."""


class TrafficReader:
    """Asks once for all who want the same minutes at about the same time. `wall`: unix time."""

    def __init__(self, ask: AskSeries, wall: Callable[[], float]) -> None:
        self._ask = ask
        self._wall = wall
        self._shared = SharedAnswers[Traffic](wall)

    async def of(self, minutes: int) -> Traffic:
        """The traffic of the last minutes, at most FRESH_S old."""
        return await self._shared.of(minutes, lambda: read(self._ask, minutes, self._wall()))


async def read(ask: AskSeries, minutes: int, wall: float) -> Traffic:
    """The traffic of the last minutes; with 0, that of now. Without an answer of Prometheus it has the reason."""
    step_s = max(LEAST_STEP_S, minutes * 60 / MOST_POINTS)
    steps = int(minutes * 60 / step_s)
    begin = wall - steps * step_s
    try:
        found = await ask(expression(max(WINDOW_S, round(2 * step_s))), begin, wall, step_s)
    except PrometheusError as error:
        return Traffic(wall, step_s, {}, str(error))
    return Traffic(wall, step_s, _by_service(found, begin, step_s, steps + 1), "")


def expression(window_s: int) -> str:
    """The query: series of (service, what), where `what` is a member of ServiceTraffic or LLMTraffic."""
    requests = _rate("service", "pierhead_requests_total", window_s)
    errors = _rate("service", "pierhead_requests_total", window_s, _ERRORS)
    by_edge = _rate("service", "haproxy_backend_http_requests_total", window_s)
    edge_errors = _rate("service", "haproxy_backend_http_responses_total", window_s, ', code="5xx"')
    waiting = 'label_replace(pierhead_queued_requests{target!=""}, "service", "$1", "target", "(.*)")'
    by_bound = _rate("le, service", _DURATIONS, window_s)
    parts = {
        "rate": f"({requests} or {by_edge})",
        "errors": f"({errors} or {requests} * 0 or {edge_errors})",
        "p50_s": f"histogram_quantile(0.5, {by_bound})",
        "p99_s": f"histogram_quantile(0.99, {by_bound})",
        "ongoing": 'sum by (service) (pierhead_ongoing_requests{service!=""})',
        "queued": f"sum by (service) ({waiting})",
        "edge": by_edge,
        **_of_models(window_s),
    }
    return " or ".join(f'label_replace({part}, "what", "{what}", "", "")' for what, part in parts.items())


def _of_models(window_s: int) -> dict[str, str]:
    """What language models have more, by members of LLMTraffic. Gateways count by the service that they call."""
    of_target = f'{{target!=""}}[{window_s}s]'
    first = f"rate(pierhead_llm_time_to_first_token_seconds_bucket{of_target})"
    by_bound = f'sum by (le, service) (label_replace({first}, "service", "$1", "target", "(.*)"))'
    counters = '{__name__=~"(vllm|mock):generation_tokens_total", service!=""}'
    return {
        "tokens": f"sum by (service) (rate({counters}[{window_s}s]))",
        "first_p50_s": f"histogram_quantile(0.5, {by_bound})",
        "first_p99_s": f"histogram_quantile(0.99, {by_bound})",
        "running": 'sum by (service) (pierhead_llm_engine_running{service!=""})',
        "waiting": 'sum by (service) (pierhead_llm_engine_waiting{service!=""})',
        "kv_use": 'max by (service) (pierhead_llm_engine_kv_use{service!=""})',
    }


def _rate(by: str, counter: str, window_s: int, where: str = "") -> str:
    return f'sum by ({by}) (rate({counter}{{service!=""{where}}}[{window_s}s]))'


def _by_service(found: Iterable[Series], begin: float, step_s: float, count: int) -> dict[str, ServiceTraffic]:
    services: dict[str, dict[str, list[float | None]]] = {}
    for series in found:
        service, what = series.labels.get("service", ""), series.labels.get("what", "")
        if what in _OF_ALL or what in LLMTraffic.__slots__:
            values = services.setdefault(service, {}).setdefault(what, [None] * count)
            for at, value in series.points:
                place = round((at - begin) / step_s)
                if 0 <= place < count:
                    values[place] = float(f"{value:.6g}")
    return {service: _traffic(members, (None,) * count) for service, members in sorted(services.items())}


def _traffic(members: Mapping[str, list[float | None]], nothing: tuple[None, ...]) -> ServiceTraffic:
    def lines(names: Iterable[str]) -> dict[str, tuple[float | None, ...]]:
        return {name: tuple(members.get(name, nothing)) for name in names}

    is_model = not members.keys().isdisjoint(LLMTraffic.__slots__)
    return ServiceTraffic(llm=LLMTraffic(**lines(LLMTraffic.__slots__)) if is_model else None, **lines(_OF_ALL))
