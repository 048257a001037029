"""What HAProxy sends where, for GET /api/v1/routes. Pure: one published view in, one document out.

Order is HAProxy's own: HTTP routes by the longest path first, then gRPC services by name. A route that the compose
files have and HAProxy does not (yet) is there with `in_haproxy` false and no servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from controller.model import RoutingState, ServiceSpec, backend_name
from controller.status import View


def routes_json(view: View) -> dict[str, Any]:
    """Return every route with the servers behind it; `haproxy` is null while it does not answer."""
    routing = view.observed.routing if view.observed else None
    services = view.desired.services if view.desired else {}
    return {
        "at": view.wall_time(view.at),
        "haproxy": _process(routing),
        "routes": [_route(*match, routing) for match in _matches(services.values())],
    }


def _process(routing: RoutingState | None) -> dict[str, Any] | None:
    if routing is None:
        return None
    return {"pid": routing.pid, "started_at": routing.started_at, "version": routing.version}


def _matches(services: Collection[ServiceSpec]) -> Iterator[tuple[str, str, ServiceSpec]]:
    """Yield (protocol, what is matched, service)."""
    http = [spec for spec in services if spec.route is not None]
    for spec in sorted(http, key=lambda spec: (-len(spec.route or ""), spec.route or "")):
        yield "http", spec.route or "", spec
    yield from sorted(
        (("grpc", name, spec) for spec in services for name in spec.grpc_services), key=lambda match: match[1]
    )


def _route(protocol: str, match: str, spec: ServiceSpec, routing: RoutingState | None) -> dict[str, Any]:
    backend = backend_name(spec.name)
    servers = [server for server in routing.servers if server.backend == backend] if routing else []
    return {
        "protocol": protocol,
        "match": match,
        "service": spec.name,
        "strip_prefix": spec.strip_prefix and protocol == "http",
        "in_haproxy": routing is not None and backend in routing.backends,
        "queued": routing.queued.get(backend, 0) if routing else 0,
        "servers": [dataclasses.asdict(server) for server in servers],
    }
