"""The probe and the limits that HAProxy uses for a service while differently made versions of it coexist. Pure.

HAProxy probes all servers of a backend in the same way. While all serving replicas were made with the same probe,
HAProxy uses that probe, even if the compose files name another one by now: a probe that no replica answers would take
the serving replicas out of rotation. While they were made with several probes, HAProxy uses none and only checks that a
replica accepts connections. The controller still probes each replica in that replica's own way.

HAProxy also has one request limit and one timeout for all servers of a backend. While versions with different values
serve, it uses the lowest limit and the longest timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..model.observed import Observed
from ..model.spec import ProbeSpec, ServiceSpec
from ..model.world import ReplicaContainer, ReplicaHealth


def edge_spec(spec: ServiceSpec, observed: Observed, made: Mapping[str, ServiceSpec]) -> ServiceSpec:
    """Return the service with the probe and the limits that HAProxy uses now.

    `made`: by version, the spec that it was made from; a version without an entry counts as made from `spec`.
    """
    serving = [
        container
        for container in observed.containers_of(spec.name)
        if container.state.is_up
        and container.health is ReplicaHealth.READY
        and container.id not in observed.retirements
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
    """Port and path of a replica's probe."""
    if container.probe is None:
        return spec.probe.port, spec.probe.path
    port, path = container.probe
    # A probe on the replica's request port stays on the request port, even if the port's number has changed.
    return (spec.port if port == container.port else port), path
