"""What HAProxy is to know of a service while versions of it that are made in different ways coexist. Pure.

HAProxy asks all servers of a backend the same question. While the replicas that serve were made with one probe, it asks
that one, whatever the compose files name by now: a probe that nothing answers must not take away what serves. While
they were made with several, no question fits all, and HAProxy asks none: it sees whether a replica takes connections.
Whether it is ready the controller still asks each replica in its own way, before HAProxy gets to know it and after.

HAProxy has one limit of requests and one of their time for all servers of a backend, too. While versions with different
ones serve, it sends each replica as much as the least of them takes, and waits as long as the most patient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ..model.observed import Observed
from ..model.spec import ProbeSpec, ServiceSpec
from ..model.world import Health, ReplicaContainer


def edge_spec(
    spec: ServiceSpec, observed: Observed, made: Mapping[str, ServiceSpec] = MappingProxyType({})
) -> ServiceSpec:
    """Return the service with the probe and the limits that HAProxy is to use now.

    `made`: by version, how it is made; one that is not in it counts as made by `spec`.
    """
    serving = [
        container
        for container in observed.containers_of(spec.name)
        if container.state.is_up and container.health is Health.READY and container.id not in observed.retirements
    ]
    if not serving:
        return spec
    versions = [made.get(version, spec) for version in {container.version for container in serving}]
    return replace(
        spec,
        probe=_probe(spec, {_target(container, spec) for container in serving}),
        max_ongoing_requests=min(one.max_ongoing_requests for one in versions),
        request_timeout_s=max(one.request_timeout_s for one in versions),
    )


def _probe(spec: ServiceSpec, targets: set[tuple[int, str]]) -> ProbeSpec:
    if len(targets) > 1:
        return replace(spec.probe, haproxy_asks=False)
    [(port, path)] = targets
    return replace(spec.probe, port=port, path=path)


def _target(container: ReplicaContainer, spec: ServiceSpec) -> tuple[int, str]:
    """Port and path that a replica is asked at."""
    if container.probe is None:
        return spec.probe.port, spec.probe.path
    port, path = container.probe
    # "The port of requests" stays that, whatever its number was for this replica.
    return (spec.port if port == container.port else port), path
