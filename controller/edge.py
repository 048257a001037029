"""What HAProxy is to know of a service while versions of it with different readiness probes coexist. Pure.

HAProxy asks all servers of a backend the same question. While none of the replicas that serve was made with the probe
that the compose files name now, it goes on asking theirs: a probe that nothing answers must not take away what serves.
With the first ready replica that was made with the new one, the new one takes over.
"""

from __future__ import annotations

from dataclasses import replace

from controller.model import Health, Observed, ReplicaContainer, ServiceSpec


def edge_spec(spec: ServiceSpec, observed: Observed) -> ServiceSpec:
    """Return the service with the probe that HAProxy is to use now."""
    serving = [
        _target(container, spec)
        for container in observed.containers_of(spec.name)
        if container.state.is_up and container.health is Health.READY and container.id not in observed.retirements
    ]
    if not serving or (spec.probe.port, spec.probe.path) in serving:
        return spec
    port, path = min(serving)
    return replace(spec, probe=replace(spec.probe, port=port, path=path))


def _target(container: ReplicaContainer, spec: ServiceSpec) -> tuple[int, str]:
    if container.probe is None:
        return spec.probe.port, spec.probe.path
    port, path = container.probe
    # "The port of requests" stays that, whatever its number was for this replica.
    return (spec.port if port == container.port else port), path
