"""Every metric of the runtime in one place: name, help, labels, buckets.

A request costs only plain additions to dictionaries. Prometheus objects are made at each scrape, from copies: user code
in another thread may be counting at that moment. `service` and `replica` are the same for a whole process and are added
to every sample then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

CONTENT_TYPE = CONTENT_TYPE_LATEST

SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 32, 64, 100, 128, 256, 512, 1024)
ROWS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 65536)

Labels = tuple[str, ...]


class Counter:
    """A number per combination of label values that only grows; hot paths add to `values` directly."""

    family: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.documentation = documentation
        self.labels = tuple(labels)
        self.values: dict[Labels, float] = {}

    def inc(self, labels: Labels = (), amount: float = 1) -> None:
        """Add to one combination of label values, in the order of `labels`."""
        self.values[labels] = self.values.get(labels, 0) + amount

    def collect(self, constant_names: Labels, constant_values: Labels) -> Metric:
        """Its samples at scrape."""
        family = self.family(self.name, self.documentation, labels=[*constant_names, *self.labels])
        for labels, value in list(self.values.items()):
            family.add_metric([*constant_values, *labels], value)
        return family


class Gauge(Counter):
    """A number per combination of label values that goes up and down."""

    family = GaugeMetricFamily


class ReadGauge:
    """A number that is read where it lives, at scrape."""

    family: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily

    def __init__(self, name: str, documentation: str) -> None:
        self.name = name
        self.documentation = documentation
        self.read: Callable[[], float] = lambda: 0.0

    def collect(self, constant_names: Labels, constant_values: Labels) -> Metric:
        """Its sample at scrape."""
        family = self.family(self.name, self.documentation, labels=list(constant_names))
        family.add_metric(list(constant_values), self.read())
        return family


class ReadCounter(ReadGauge):
    """A number that only grows and is read where it lives, at scrape."""

    family = CounterMetricFamily


class Histogram:
    """Counts per bucket for each combination of label values."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], buckets: Sequence[float]) -> None:
        self.name = name
        self.documentation = documentation
        self.labels = tuple(labels)
        self.bounds = tuple(buckets)
        self._series: dict[Labels, list[float]] = {}

    def observe(self, labels: Labels, value: float) -> None:
        """Count one value. The series is [sum, bucket 0, ..., bucket +Inf], not cumulated until scrape."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = [0.0] * (len(self.bounds) + 2)
        series[0] += value
        series[bisect_left(self.bounds, value) + 1] += 1

    def collect(self, constant_names: Labels, constant_values: Labels) -> Metric:
        """Its samples at scrape, cumulated."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=[*constant_names, *self.labels])
        for labels, series in list(self._series.items()):
            total = 0.0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip([*self.bounds, float("inf")], series[1:], strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
            family.add_metric([*constant_values, *labels], buckets, series[0])
        return family


class RuntimeMetrics(Collector):
    """The runtime's metrics of one process. `service` and `replica` are filled in by the server when it starts."""

    def __init__(self) -> None:
        self.service = ""
        self.replica = ""
        self.requests = Counter(
            "pierhead_requests_total", "Requests this replica has answered, refused ones included.", ("method", "code")
        )
        self.request_duration = Histogram(
            "pierhead_request_duration_seconds", "From accepting a request to its end.", ("method", "code"), SECONDS
        )
        self.ongoing = ReadGauge("pierhead_ongoing_requests", "Requests this replica works on now.")
        self.refused = Counter(
            "pierhead_refused_requests_total", "Requests refused before any work: overloaded, draining.", ("reason",)
        )
        self.ready = ReadGauge("pierhead_replica_ready", "1 while this replica says that it is ready, else 0.")
        self.loop_blocked = ReadCounter(
            "pierhead_event_loop_blocked_seconds_total",
            "Time for which single callbacks, of 0.2 s and more, have kept the event loop from everything else.",
        )
        self.loop_lag = ReadGauge(
            "pierhead_event_loop_lag_seconds", "How late the event loop ran what was due, at most, in the last 15 s."
        )
        self.log_lines_dropped = ReadCounter(
            "pierhead_log_lines_dropped_total", "Log lines that came faster than they could be written."
        )
        self.queued = Gauge(
            "pierhead_queued_requests", "Calls of this process that wait for a replica of the target.", ("target",)
        )
        self.handle_requests = Counter(
            "pierhead_handle_requests_total", "Calls made by this process, by how they ended.", ("target", "outcome")
        )
        self.handle_retries = Counter(
            "pierhead_handle_retries_total",
            "Calls that another replica was asked for, none of whose work had begun: overloaded, draining, connect.",
            ("target", "reason"),
        )
        self.handle_ejections = Counter(
            "pierhead_handle_ejections_total",
            "Times that a replica of the target was left out because its calls failed.",
            ("target",),
        )
        self.handle_duration = Histogram(
            "pierhead_handle_duration_seconds",
            "Calls as their caller saw them, queueing included.",
            ("target",),
            SECONDS,
        )
        self.shared_memory_tensors = Counter(
            "pierhead_shared_memory_tensors_total",
            "Tensors by the way of their content: shared; copied once more; as bytes, as the memory is full, the "
            "other side elsewhere, or the memory for a tensor of that size new.",
            ("way",),
        )
        self.shared_memory_sent = Counter(
            "pierhead_shared_memory_sent_bytes_total", "Bytes of content that went by shared memory."
        )
        self.shared_memory_copied = Counter(
            "pierhead_shared_memory_copied_bytes_total", "Bytes written into shared memory."
        )
        self.shared_memory_bytes = ReadGauge(
            "pierhead_shared_memory_bytes", "Shared memory that this process has made, by the kernel's count."
        )
        self.shared_memory_limit = ReadGauge(
            "pierhead_shared_memory_limit_bytes", "Most shared memory that this process makes; 0 = none."
        )
        self.shared_memory_regions = ReadGauge("pierhead_shared_memory_regions", "Regions of it.")
        self.shared_memory_peers = ReadGauge("pierhead_shared_memory_peers", "Links to processes that share it.")
        self.batch_size = Histogram("pierhead_batch_size", "Requests per batch.", ("batch",), SIZES)
        self.batch_rows = Histogram("pierhead_batch_rows", "Rows per batch.", ("batch",), ROWS)
        self.batch_wait = Histogram(
            "pierhead_batch_wait_seconds", "How long a batch's oldest request waited for it.", ("batch",), SECONDS
        )
        self.batch_duration = Histogram(
            "pierhead_batch_duration_seconds", "How long a batch took to compute.", ("batch",), SECONDS
        )
        self.multiplex_models = Gauge("pierhead_multiplex_models", "Models that are loaded here.", ("loader",))
        self.multiplex_hits = Counter(
            "pierhead_multiplex_hits_total", "Times that a model was asked for and was loaded already.", ("loader",)
        )
        self.multiplex_misses = Counter(
            "pierhead_multiplex_misses_total", "Times that a model was asked for and was not loaded.", ("loader",)
        )
        self.multiplex_loads = Counter("pierhead_multiplex_loads_total", "Models loaded.", ("loader",))
        self.multiplex_load_failures = Counter(
            "pierhead_multiplex_load_failures_total", "Models whose loading failed.", ("loader",)
        )
        self.multiplex_unloads = Counter("pierhead_multiplex_unloads_total", "Models unloaded.", ("loader",))
        self.multiplex_load_duration = Histogram(
            "pierhead_multiplex_load_duration_seconds", "How long a model took to load.", ("loader",), SECONDS
        )
        self.texts: list[Callable[[], bytes]] = []
        """Further text in the same format for the page: metrics of engines that keep their own."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at scrape."""
        names, values = ("service", "replica"), (self.service, self.replica)
        for metric in vars(self).values():
            if isinstance(metric, Counter | ReadGauge | Histogram):
                yield metric.collect(names, values)

    def expose(self) -> bytes:
        """The text that GET /metrics answers, of type CONTENT_TYPE."""
        return b"".join([generate_latest(self._registry), *[text() for text in self.texts]])

    def register(self, collector: Collector) -> None:
        """Let a service add metrics of its own to the same page."""
        self._registry.register(collector)

    def unregister(self, collector: Collector) -> None:
        """Take metrics off the page."""
        self._registry.unregister(collector)


PROCESS = RuntimeMetrics()
"""The metrics of this process: `handle` and `batch` count into them, a server exposes them."""
