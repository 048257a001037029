"""The load of each service, from one snapshot of the world. Pure.

A request counts once: at the replica that works on it, or where it waits for a replica. Draining replicas finish their
requests and need no capacity elsewhere, so their requests do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..model.observed import Observed
from ..model.spec import backend_name
from ..model.world import ReplicaContainer
from .autoscale import ServiceLoad


def loads(services: Collection[str], observed: Observed) -> Mapping[str, ServiceLoad]:
    """Return the load of each of these services now."""
    up = [container for container in observed.containers if container.state.is_up]
    return {
        name: ServiceLoad(
            running=sum(
                _in_work(container, observed)
                for container in observed.containers_of(name)
                if container.state.is_up and container.id not in observed.retirements
            ),
            waiting=_waits_at_edge(name, observed) + held + sum(container.waiting.get(name, 0) for container in up),
            held=held,
        )
        for name in services
        for held in (held_at_edge(name, observed),)
    }


def held_at_edge(service: str, observed: Observed) -> int:
    """Return how many requests HAProxy holds because no replica of the service takes traffic."""
    found = observed.routing.held.get(backend_name(service)) if observed.routing else None
    return found.now if found else 0


def _in_work(container: ReplicaContainer, observed: Observed) -> int:
    """Requests in flight as the replica reports them; for an image that reports none, HAProxy's open sessions."""
    if container.ongoing is not None:
        return container.ongoing
    server = observed.routing.server_of(container.service, container.name) if observed.routing else None
    return server.sessions if server else 0


def _waits_at_edge(service: str, observed: Observed) -> int:
    if observed.routing is None:
        return 0
    backend = backend_name(service)
    of_servers = sum(server.queued for server in observed.routing.servers if server.backend == backend)
    return observed.routing.queued.get(backend, 0) + of_servers
