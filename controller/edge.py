"""What HAProxy is to know of a service while versions of it with different readiness probes coexist. Pure.

HAProxy asks all servers of a backend the same question. While the replicas that serve were made with one probe, it asks
that one, whatever the compose files name by now: a probe that nothing answers must not take away what serves. While
they were made with several, no question fits all, and HAProxy asks none: it sees whether a replica takes connections.
Whether it is ready the controller still asks each replica in its own way, before HAProxy gets to know it and after.
"""

from __future__ import annotations

from dataclasses import replace

from controller.model import Health, Observed, ReplicaContainer, ServiceSpec


def edge_spec(spec: ServiceSpec, observed: Observed) -> ServiceSpec:
    """Return the service with the probe that HAProxy is to use now."""
    serving = {
        _target(container, spec)
        for container in observed.containers_of(spec.name)
        if container.state.is_up and container.health is Health.READY and container.id not in observed.retirements
    }
    if not serving:
        return spec
    if len(serving) > 1:
        return replace(spec, probe=replace(spec.probe, haproxy_asks=False))
    [(port, path)] = serving
    return replace(spec, probe=replace(spec.probe, port=port, path=path))


def _target(container: ReplicaContainer, spec: ServiceSpec) -> tuple[int, str]:
    if container.probe is None:
        return spec.probe.port, spec.probe.path
    port, path = container.probe
    # "The port of requests" stays that, whatever its number was for this replica.
    return (spec.port if port == container.port else port), path
