"""Selects the replicas that Discovery sends to callers, and the replicas that Prometheus scrapes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pierhead.discovery.v1.discovery_pb2 import Endpoint, ServiceEndpoints

from ..model.desired import Desired, VersionGoal, goal_of
from ..model.observed import Observed
from ..model.spec import ServiceSpec, socket_address, unix_address
from ..model.world import ReplicaContainer, ReplicaHealth, tcp_address
from ..plan.shares import weights
from .records.answers import Target


def endpoints(
    desired: Desired, observed: Observed, overrides: Mapping[str, int] = MappingProxyType({})
) -> Mapping[str, ServiceEndpoints]:
    """Return the callable and the draining replicas of every service of the spec, by replica name.

    `overrides`: the numbers of replicas that `pierhead scale` has set, by service. Epoch and generation are not set.
    """
    files, scaled = "`replicas: 0` in the compose files", "`pierhead scale`"
    found = {
        name: ServiceEndpoints(
            service=name,
            max_queued_requests=spec.max_queued_requests,
            policy=spec.router_policy,
            policy_kwargs=spec.router_policy_kwargs,
            scaled_to_zero_by=(scaled if name in overrides else files) if name in desired.switched_off else "",
        )
        for name, spec in desired.services.items()
    }
    for container in sorted(observed.containers, key=lambda container: container.name):
        spec = desired.services.get(container.service)
        if spec is None:
            continue
        spec = _made(container, goal_of(desired, observed, container.service)) or spec
        endpoint = _endpoint(container, spec, retiring=container.id in observed.retirements)
        if endpoint is not None:
            found[container.service].endpoints.append(endpoint)
    for name, listed in found.items():
        _weigh(listed, goal_of(desired, observed, name))
    return found


def _made(container: ReplicaContainer, goal: VersionGoal) -> ServiceSpec | None:
    """The spec that the replica was made from; None where its version is not wanted."""
    if container.version == goal.version:
        return goal.spec
    return goal.keep_spec if container.version == goal.keep else None


def _weigh(listed: ServiceEndpoints, goal: VersionGoal) -> None:
    """Set each endpoint's weight while a canary version receives a share of the calls."""
    if goal.keep is None or goal.weight is None:
        return
    serving = [one.version == goal.version for one in listed.endpoints if one.state == Endpoint.READY]
    of_new, of_old = weights(goal.weight, serving.count(True), serving.count(False))
    for one in listed.endpoints:
        one.weight = of_new if one.version == goal.version else of_old


METRICS_PORT = 8404
"""Of HAProxy."""


def scrape_targets(desired: Desired, observed: Observed) -> tuple[Target, ...]:
    """Return Prometheus http_sd groups: every replica that is up and exports metrics, from its start on.

    Prometheus needs some seconds to pick up a new target. A replica that is listed while it starts is scraped as soon
    as it is ready. Where there are nodes, each target has the label of its node, and their HAProxys are targets, too.
    """
    groups = [
        Target((socket_address(ip, METRICS_PORT),), {"job": "haproxy", "node": node, "instance": node})
        for node, ip in (observed.routing.edge_addresses.items() if observed.routing else ())
    ]
    for container in sorted(observed.containers, key=lambda container: container.name):
        spec = desired.services.get(container.service)
        if spec is None or spec.metrics_port is None:
            continue
        if container.state.is_up and container.ip:
            labels = {
                "job": "replicas",
                "service": container.service,
                "replica": container.name,
                "version": container.version,
                "gpu": ",".join(container.gpus),
                "__metrics_path__": spec.metrics_path,
                **({"node": container.node} if observed.nodes else {}),
            }
            groups.append(Target((socket_address(container.ip, spec.metrics_port),), labels))
    return tuple(groups)


# ------------------------------------------------------------------------------------------------------------ addresses


def _endpoint(container: ReplicaContainer, spec: ServiceSpec, *, retiring: bool) -> Endpoint | None:
    address = tcp_address(container, spec)
    if address is None or not container.state.is_up:
        return None
    serving = container.health is ReplicaHealth.READY
    finishing = container.reported_draining or (retiring and container.health is not ReplicaHealth.UNKNOWN)
    if not serving and not finishing:
        return None
    return Endpoint(
        replica=container.name,
        address=address,
        socket=unix_address(container.service, container.name) if container.has_socket else "",
        state=Endpoint.DRAINING if retiring or container.reported_draining else Endpoint.READY,
        max_ongoing_requests=max(spec.max_ongoing_requests, 0),
        version=container.version,
        node=container.node,
        weight=1,
        stats=container.stats.numbers,
        stats_version=container.stats.version,
    )
