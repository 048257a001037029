"""The controller's own metrics. Gauges are computed from the published view at each scrape, so the series of a removed
service or replica end with it. Counters and histograms are updated at the event that they count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ..model.actions import action_name
from ..model.nodes import Quorum
from ..model.plan import Outcome
from ..model.spec import backend_name
from ..model.world import HeldRequests
from .nodes import edge_differences
from .records.services import Service
from .view import View

TICK_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0)
ACTION_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ControllerMetrics(Collector):
    """A separate registry; `view` returns the latest published view (None before the first tick)."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, view: Callable[[], View | None] = lambda: None) -> None:
        self._view = view
        self.registry = CollectorRegistry()
        self.tick = self._durations(
            "pierhead_controller_tick_seconds",
            "Duration of one tick: observation, plan and publication (actions not included).",
        )
        self.engine_reading = self._durations(
            "pierhead_controller_engine_reading_seconds",
            "Duration of one reading of the engine. Until then, ticks use the previous reading.",
        )
        self.haproxy_reading = self._durations(
            "pierhead_controller_haproxy_reading_seconds",
            "Duration of one reading of HAProxy. Until then, ticks use the previous reading.",
        )
        self._failed_ticks = Counter(
            "pierhead_controller_failed_ticks", "Ticks that raised; the log has the error.", registry=self.registry
        )
        self._actions = Counter(
            "pierhead_controller_actions",
            "Actions carried out, by kind and outcome.",
            ["action", "outcome"],
            registry=self.registry,
        )
        self._action_seconds = Histogram(
            "pierhead_controller_action_seconds",
            "Duration of actions.",
            ["action"],
            buckets=ACTION_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _durations(self, name: str, documentation: str) -> Callable[[float], None]:
        """Return a function that counts one duration in seconds."""
        return Histogram(name, documentation, buckets=TICK_BUCKETS_S, registry=self.registry).observe

    def tick_failed(self) -> None:
        """Count one tick that raised."""
        self._failed_ticks.inc()

    def action(self, outcome: Outcome) -> None:
        """Count one finished action."""
        name = action_name(outcome.action)
        self._actions.labels(name, "failed" if outcome.error else "ok").inc()
        self._action_seconds.labels(name).observe(outcome.took_s)

    def page(self) -> bytes:
        """Return the metrics in Prometheus's text form."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of the published view; families have no samples while nothing is known."""
        view = self._view() or View(at=0.0, project="")
        yield from _services(view)
        yield _replicas(view)
        yield from _gpu_memory(view)
        yield from _nodes(view)
        yield from _stack(view)


def _gauge(name: str, documentation: str, label: str, samples: Iterable[tuple[str, float | None]]) -> GaugeMetricFamily:
    """A gauge with one label; a value of None has no sample."""
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for of, value in samples:
        if value is not None:
            family.add_metric([of], value)
    return family


def _services(view: View) -> Iterator[Metric]:
    failures: dict[str, int] = {}
    for (service, _), record in view.observed.failures.items():
        failures[service] = max(failures.get(service, 0), record.count)

    def gauge(name: str, documentation: str, value: Callable[[Service], float | None]) -> Metric:
        samples = [(row.name, value(row)) for row in view.services]
        return _gauge(f"pierhead_service_{name}", documentation, "service", samples)

    def pending(row: Service) -> float:
        return sum(replica.state == "PENDING" for replica in row.replicas)

    def in_failures(row: Service) -> float:
        return failures.get(row.name, 0)

    def rollout_age_s(row: Service) -> float | None:  # None: the compose files do not have it
        return None if row.image is None else row.at - row.rollout.begun_at if row.rollout else 0.0

    def turned_down(row: Service) -> float | None:
        return None if row.image is None else row.turned_down is not None

    yield gauge("wanted_replicas", "Target number of replicas.", lambda row: row.wanted)
    yield gauge("ready_replicas", "Replicas that take traffic.", lambda row: row.ready)
    yield gauge("pending_replicas", "Replicas that cannot be started yet.", pending)
    yield gauge("failures_in_a_row", "Replicas that failed since the service last worked.", in_failures)
    load = "Requests in work and waiting, as the autoscaler sees them."
    yield gauge("autoscale_load", load, lambda row: row.autoscale.load if row.autoscale else None)
    asked = "Replicas that this load asks for."
    yield gauge("autoscale_wanted_replicas", asked, lambda row: row.autoscale.wanted if row.autoscale else None)
    yield gauge("rollout_age_seconds", "Time since the rollout began; 0 = no rollout.", rollout_age_s)
    rolled_back = "1 while the files give a version that was rolled back or refused, unless an operator asked for that."
    yield gauge("rolled_back", rolled_back, turned_down)
    yield from _held(view)


def _held(view: View) -> Iterator[Metric]:
    routing = view.observed.routing
    routed = sorted(spec.name for spec in view.desired.services.values() if spec.is_routed) if view.desired else []
    found = {name: routing.held.get(backend_name(name), HeldRequests()) for name in routed} if routing else {}
    yield _gauge(
        "pierhead_edge_held_requests",
        "Requests that wait at HAProxy for a first replica.",
        "service",
        [(name, held.now) for name, held in found.items()],
    )
    ended = CounterMetricFamily(
        "pierhead_edge_ended_holds",
        "Requests that waited at HAProxy for a first replica, by how that ended. Resets when HAProxy restarts.",
        labels=["service", "ending"],
    )
    for name, held in found.items():
        for ending in ("served", "expired", "left", "refused"):
            ended.add_metric([name, ending], getattr(held, ending))
    yield ended


def _replicas(view: View) -> Metric:
    labels = ["service", "replica", "version", "gpu", "state"]
    state = GaugeMetricFamily("pierhead_service_replica_state", "1 for the state a replica is in.", labels=labels)
    for row in view.services:
        for replica in row.replicas:
            if replica.name:
                values = [row.name, replica.name, replica.version, ",".join(replica.gpus), replica.state]
                state.add_metric(values, 1)
    return state


def _gpu_memory(view: View) -> Iterator[Metric]:
    for name, documentation, samples in (
        ("", "Memory of a GPU.", [(gpu.uuid, gpu.memory_bytes) for gpu in view.gpus]),
        ("used_", "Memory in use, by any process.", [(gpu.uuid, gpu.used_bytes) for gpu in view.gpus]),
        ("free_", "Memory that is free for a new slot.", [(gpu.uuid, gpu.free_bytes) for gpu in view.gpus]),
    ):
        yield _gauge(f"pierhead_gpu_memory_{name}bytes", documentation, "gpu", samples)


def _nodes(view: View) -> Iterator[Metric]:
    labels = ["node", "role", "availability"]
    ready = GaugeMetricFamily("pierhead_node_ready", "1 while the node is ready.", labels=labels)
    for node in view.nodes:
        role = "worker" if node.role == "worker" else "manager"
        ready.add_metric([node.name, role, node.availability], float(node.state == "ready"))
    yield ready
    replicas = [(node.name, node.replicas) for node in view.nodes]
    yield _gauge("pierhead_node_replicas", "Replicas on the node.", "node", replicas)


def _stack(view: View) -> Iterator[Metric]:
    gpus = view.gpus
    quorum = Quorum.of(view.observed.nodes) if view.observed.nodes else None
    facts = (
        ("pierhead_managers_ready", "Managers that are not down.", quorum.ready if quorum else None),
        (
            "pierhead_managers_needed",
            "Managers without which nothing can be changed.",
            quorum.needed if quorum else None,
        ),
        ("pierhead_gpu_slots", "GPU slots this machine has, those with a fault included.", len(gpus)),
        ("pierhead_gpu_faults", "GPUs that are not used because of a fault.", sum(bool(gpu.fault) for gpu in gpus)),
        ("pierhead_gpu_slots_used", "GPU slots that a container holds.", sum(bool(gpu.holder) for gpu in gpus)),
        ("pierhead_controller_haproxy_reachable", "1 when HAProxy's socket answers.", view.haproxy_reachable),
        ("pierhead_controller_engine_reachable", "1 when the Docker Engine answers.", view.engine_reachable),
        ("pierhead_controller_spec_error", "1 while the compose files cannot be used.", bool(view.spec_problems)),
        (
            "pierhead_edge_certificate_expiry_timestamp_seconds",
            "When the certificates between controller and edges end (unix time); none on one machine.",
            view.certificate_ends_at,
        ),
    )
    for name, documentation, value in facts:
        yield GaugeMetricFamily(name, documentation, value=value)
    yield _gauge(
        "pierhead_client_certificate_expiry_timestamp_seconds",
        "When a certificate of HAProxy for clients ends (unix time), in the past for a placeholder; none without TLS.",
        "file",
        [(file, end) for file, (_, end) in sorted(view.client_certificates.items())],
    )
    yield _gauge(
        "pierhead_client_certificate_lifetime_seconds",
        "How long a certificate of HAProxy for clients is valid as a whole.",
        "file",
        [(file, end - begin) for file, (begin, end) in sorted(view.client_certificates.items())],
    )
    yield _gauge(
        "pierhead_edge_differs",
        "1 while a node's HAProxy does not run, does not answer, or differs from the others.",
        "node",
        [(node, bool(why)) for node, why in edge_differences(view.observed).items()],
    )
