"""The controller's own metrics. Gauges are computed from the published view at each scrape, so the series of a removed
service or replica end with it. Counters and histograms are updated at the event that they count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ..model.actions import action_name
from ..model.nodes import Quorum
from ..model.plan import Outcome
from ..model.spec import backend_name
from ..model.world import HeldRequests
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
        view = self._view()
        yield from _services(view)
        yield from _replicas(view)
        yield from _gpu_memory(view)
        yield from _nodes(view)
        yield from _stack(view)


def _services(view: View | None) -> Iterator[Metric]:
    wanted = GaugeMetricFamily("pierhead_service_wanted_replicas", "Target number of replicas.", labels=["service"])
    ready = GaugeMetricFamily("pierhead_service_ready_replicas", "Replicas that take traffic.", labels=["service"])
    pending = GaugeMetricFamily(
        "pierhead_service_pending_replicas", "Replicas that cannot be started yet.", labels=["service"]
    )
    failures = GaugeMetricFamily(
        "pierhead_service_failures_in_a_row", "Replicas that failed since the service last worked.", labels=["service"]
    )
    for row in view.services if view else ():
        wanted.add_metric([row.name], row.wanted)
        ready.add_metric([row.name], row.ready)
        pending.add_metric([row.name], sum(replica.state == "PENDING" for replica in row.replicas))
        records = view.observed.failures if view and view.observed else {}
        in_a_row = [record.count for (service, _), record in records.items() if service == row.name]
        failures.add_metric([row.name], max(in_a_row, default=0))
    yield from (wanted, ready, pending, failures)
    yield from _autoscaling(view)
    yield from _rollouts(view)
    yield from _held(view)


def _rollouts(view: View | None) -> Iterator[Metric]:
    age = GaugeMetricFamily(
        "pierhead_service_rollout_age_seconds", "Time since the rollout began; 0 = no rollout.", labels=["service"]
    )
    rejected = GaugeMetricFamily(
        "pierhead_service_rolled_back",
        "1 while the files give a version that was rolled back or refused, unless an operator asked for that.",
        labels=["service"],
    )
    for row in view.services if view else ():
        if row.image is not None:  # the compose files have it
            age.add_metric([row.name], row.at - row.rollout.begun_at if row.rollout else 0.0)
            rejected.add_metric([row.name], float(row.turned_down is not None))
    yield from (age, rejected)


def _held(view: View | None) -> Iterator[Metric]:
    held = GaugeMetricFamily(
        "pierhead_edge_held_requests", "Requests that wait at HAProxy for a first replica.", labels=["service"]
    )
    ended = CounterMetricFamily(
        "pierhead_edge_ended_holds",
        "Requests that waited at HAProxy for a first replica, by how that ended. Resets when HAProxy restarts.",
        labels=["service", "ending"],
    )
    routing = view.observed.routing if view and view.observed else None
    specs = view.desired.services if view and view.desired and routing else {}
    for name in sorted(name for name, spec in specs.items() if spec.is_routed):
        found = routing.held.get(backend_name(name), HeldRequests()) if routing else HeldRequests()
        held.add_metric([name], found.now)
        for ending in ("served", "expired", "left", "refused"):
            ended.add_metric([name, ending], getattr(found, ending))
    yield from (held, ended)


def _autoscaling(view: View | None) -> Iterator[Metric]:
    load = GaugeMetricFamily(
        "pierhead_service_autoscale_load",
        "Requests in work and waiting, as the autoscaler sees them.",
        labels=["service"],
    )
    asked = GaugeMetricFamily(
        "pierhead_service_autoscale_wanted_replicas", "Replicas that this load asks for.", labels=["service"]
    )
    for row in view.services if view else ():
        if row.autoscale is not None:
            load.add_metric([row.name], row.autoscale.load)
            asked.add_metric([row.name], row.autoscale.wanted)
    yield from (load, asked)


def _replicas(view: View | None) -> Iterator[Metric]:
    labels = ["service", "replica", "version", "gpu", "state"]
    state = GaugeMetricFamily("pierhead_service_replica_state", "1 for the state a replica is in.", labels=labels)
    for row in view.services if view else ():
        for replica in row.replicas:
            if replica.name:
                values = [row.name, replica.name, replica.version, ",".join(replica.gpus), replica.state]
                state.add_metric(values, 1)
    yield state


def _gpu_memory(view: View | None) -> Iterator[Metric]:
    total = GaugeMetricFamily("pierhead_gpu_memory_bytes", "Memory of a GPU.", labels=["gpu"])
    used = GaugeMetricFamily("pierhead_gpu_memory_used_bytes", "Memory in use, by any process.", labels=["gpu"])
    free = GaugeMetricFamily("pierhead_gpu_memory_free_bytes", "Memory that is free for a new slot.", labels=["gpu"])
    for gpu in view.gpus if view else ():
        for family, value in ((total, gpu.memory_bytes), (used, gpu.used_bytes), (free, gpu.free_bytes)):
            if value is not None:
                family.add_metric([gpu.uuid], value)
    yield from (total, used, free)


def _nodes(view: View | None) -> Iterator[Metric]:
    ready = GaugeMetricFamily("pierhead_node_ready", "1 while the node is ready.", labels=["node", "role"])
    replicas = GaugeMetricFamily("pierhead_node_replicas", "Replicas on the node.", labels=["node"])
    managers = GaugeMetricFamily("pierhead_managers_ready", "Managers that are not down.")
    needed = GaugeMetricFamily("pierhead_managers_needed", "Managers without which nothing can be changed.")
    for node in view.nodes if view else ():
        role = "worker" if node.role == "worker" else "manager"
        ready.add_metric([node.name, role], float(node.state == "ready"))
        replicas.add_metric([node.name], node.replicas)
    if view and view.observed and view.observed.nodes:
        quorum = Quorum.of(view.observed.nodes)
        managers.add_metric([], quorum.ready)
        needed.add_metric([], quorum.needed)
    yield from (ready, replicas, managers, needed)


def _stack(view: View | None) -> Iterator[Metric]:
    view = view or View(at=0.0, project="")
    gpus = view.gpus
    facts = (
        ("pierhead_gpu_slots", "GPU slots this machine has, those with a fault included.", len(gpus)),
        ("pierhead_gpu_faults", "GPUs that are not used because of a fault.", sum(bool(gpu.fault) for gpu in gpus)),
        ("pierhead_gpu_slots_used", "GPU slots that a container holds.", sum(bool(gpu.holder) for gpu in gpus)),
        ("pierhead_controller_haproxy_reachable", "1 when HAProxy's socket answers.", view.haproxy_reachable),
        ("pierhead_controller_engine_reachable", "1 when the Docker Engine answers.", view.engine_reachable),
        ("pierhead_controller_spec_error", "1 while the compose files cannot be used.", bool(view.spec_problems)),
    )
    for name, documentation, value in facts:
        family = GaugeMetricFamily(name, documentation)
        if value is not None:
            family.add_metric([], float(value))
        yield family
    differs = GaugeMetricFamily(
        "pierhead_edge_differs", "1 while a node's HAProxy does not answer, or is not as the others.", labels=["node"]
    )
    routing = view.observed.routing if view.observed else None
    for node, why in routing.edges.items() if routing else ():
        differs.add_metric([node], float(bool(why)))
    expiry = GaugeMetricFamily(
        "pierhead_edge_certificate_expiry_timestamp_seconds",
        "When the certificates between controller and edges end (unix time); none on one machine.",
    )
    if view.certificate_ends_at is not None:
        expiry.add_metric([], view.certificate_ends_at)
    yield from (differs, expiry)
