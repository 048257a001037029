"""The load of each service, from one snapshot of the world, and whether it was used since the last one. Pure.

A request counts once: at the replica that works on it, or where it waits for a replica. Draining replicas finish their
requests and need no capacity elsewhere, so their requests do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class Uses:
    """Remembers how many requests each replica has had: only that shows one that came and went between two looks."""

    _counts: dict[tuple[str, bool], int] = field(default_factory=dict)
    """By container, and whether the replica itself has counted; if it does not answer for a moment, its count stays."""

    def look(self, services: Collection[str], observed: Observed) -> Collection[str]:
        """Return those of these services that had a request end since the last look."""
        used, before, self._counts = set(), self._counts, {}
        for name in services:
            for one in observed.containers_of(name):
                own, edge = (one.id, True), (one.id, False)
                self._counts |= {key: before[key] for key in (own, edge) if key in before}
                key, count = (own, one.used) if one.used is not None else (edge, _answered_at_edge(one, observed))
                if count is None:
                    continue
                if count > before.get(key, count):
                    used.add(name)
                self._counts[key] = count
        return used


def _answered_at_edge(container: ReplicaContainer, observed: Observed) -> int | None:
    """Return what HAProxy has counted; None while it does not answer."""
    if observed.routing is None:
        return None
    server = observed.routing.server_of(container.service, container.name)
    return server.answered if server else 0
