"""Selects the replicas that Discovery sends to callers, and the replicas that Prometheus scrapes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ..model.desired import Desired, VersionGoal, goal_of
from ..model.observed import Observed
from ..model.reports import ReplicaEndpoint, ServiceEndpoints
from ..model.spec import ServiceSpec, socket_address
from ..model.world import ReplicaContainer, ReplicaHealth, service_address
from ..plan.shares import weights
from .records.answers import Target


def endpoints(
    desired: Desired, observed: Observed, overrides: Mapping[str, int] = MappingProxyType({})
) -> Mapping[str, ServiceEndpoints]:
    """Return the callable and the draining replicas of every service of the spec, by replica name.

    `overrides`: the numbers of replicas that `pierhead scale` has set, by service.
    """
    found: dict[str, list[ReplicaEndpoint]] = {name: [] for name in desired.services}
    for container in sorted(observed.containers, key=lambda container: container.name):
        spec = desired.services.get(container.service)
        if spec is None:
            continue
        spec = _made(container, goal_of(desired, observed, container.service)) or spec
        endpoint = _endpoint(container, spec, retiring=container.id in observed.retirements)
        if endpoint is not None:
            found[container.service].append(endpoint)
    return {
        name: ServiceEndpoints(
            tuple(_weighed(listed, goal_of(desired, observed, name))),
            desired.services[name].max_queued_requests,
            desired.services[name].router_policy,
            desired.services[name].router_policy_kwargs,
            _set_to_zero_by(name, overrides) if name in desired.switched_off else "",
        )
        for name, listed in found.items()
    }


def _set_to_zero_by(service: str, overrides: Mapping[str, int]) -> str:
    return "`pierhead scale`" if service in overrides else "`replicas: 0` in the compose files"


def _made(container: ReplicaContainer, goal: VersionGoal) -> ServiceSpec | None:
    """The spec that the replica was made from; None where its version is not wanted."""
    if container.version == goal.version:
        return goal.spec
    return goal.keep_spec if container.version == goal.keep else None


def _weighed(listed: list[ReplicaEndpoint], goal: VersionGoal) -> list[ReplicaEndpoint]:
    """Set each endpoint's weight while a canary version receives a share of the calls."""
    if goal.keep is None or goal.weight is None:
        return listed
    serving = [endpoint.version == goal.version for endpoint in listed if not endpoint.draining]
    of_new, of_old = weights(goal.weight, serving.count(True), serving.count(False))
    return [replace(one, weight=of_new if one.version == goal.version else of_old) for one in listed]


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


def _endpoint(container: ReplicaContainer, spec: ServiceSpec, *, retiring: bool) -> ReplicaEndpoint | None:
    address = service_address(container, spec)
    if address is None or not container.state.is_up:
        return None
    serving = container.health is ReplicaHealth.READY
    finishing = container.reported_draining or (retiring and container.health is not ReplicaHealth.UNKNOWN)
    if not serving and not finishing:
        return None
    return ReplicaEndpoint(
        replica=container.name,
        address=address,
        draining=retiring or container.reported_draining,
        max_ongoing_requests=max(spec.max_ongoing_requests, 0),
        version=container.version,
        node=container.node,
        stats=container.stats,
    )
