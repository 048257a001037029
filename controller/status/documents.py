"""Builds the API's documents about the plan, the routes, the events and logs. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Literal

from ..model.actions import Action, action_name
from ..model.keys import ServiceKey
from ..model.reports import RolloutStatus
from ..model.spec import ServiceSpec, backend_name, by_precedence
from ..model.world import RoutingState
from ..plan.user_config import progress_words
from ..storage.rows import StoredEvent
from .records.answers import (
    ActionDocument,
    EventDocument,
    HAProxyProcess,
    KeyDocument,
    PlanDocument,
    ReplicaLog,
    Route,
    Routes,
    StepDocument,
)
from .records.services import MachineDocument, Service
from .view import View


def machine_document(view: View) -> MachineDocument | None:
    """Return what the machine has, and what it has left; None where that is not known, or there are several."""
    found = view.observed.machine
    return MachineDocument(found.cores, found.load, found.memory_bytes, found.free_bytes) if found else None


def replica_log(replica: str, text: str) -> ReplicaLog:
    """Return the last lines of a replica's log, and the engine's time of each."""
    entries = list(timed_lines(text))
    return ReplicaLog(replica, tuple(line for _, line in entries), tuple(time for time, _ in entries))


_OF_THE_LAST_GOOD = "the compose files cannot be used; what follows is the plan of the last good ones:"


def plan_words(view: View, in_progress: tuple[Action, ...]) -> str:
    """Return the plan as text, actions in progress first."""
    if view.desired is None and not view.spec_problems:
        return "no plan yet: the compose files have not been read"
    if view.desired is None:
        return "\n".join(["no plan: the compose files cannot be used", *view.spec_problems])
    unusable = [_OF_THE_LAST_GOOD, *view.spec_problems] if view.spec_problems else []
    doing = [f"in progress: {action.words}: {action.cause}" for action in in_progress]
    changes = [
        line
        for row in view.services
        for line in (*rollout_lines(row.name, view.rollouts.get(row.name)), *user_config_lines(row))
    ]
    if (doing or changes) and not (view.plan.steps or view.plan.pending):
        return "\n".join([*unusable, *changes, *doing])
    return "\n".join([*unusable, *changes, *doing, str(view.plan)])


def rollout_lines(name: str, status: RolloutStatus | None) -> list[str]:
    """Return the changes that a rollout of the service makes, or would make, as a diff."""
    if status is None or not status.changes:
        return []
    message = status.message or f"{status.state.stable} -> {status.offered}"
    return [f"rollout of {name}: {message}", *map("  {}".format, status.changes)]


def user_config_lines(row: Service) -> list[str]:
    """Return the changes of a service's user_config, as a diff."""
    config = row.user_config
    if config is None or config.everywhere:
        return []
    lines = [f"user_config of {row.name}: {progress_words(config)}; no restart", *map("  {}".format, config.changes)]
    return [*lines, *map("  {}".format, config.refused)]


def plan_document(view: View, in_progress: tuple[Action, ...]) -> PlanDocument:
    """Return the plan."""
    return PlanDocument(
        view.spec_problems,
        tuple(StepDocument(step.number, step.after, *_described(step.action)) for step in view.plan.steps),
        view.plan.pending,
        tuple(ActionDocument(*_described(action)) for action in in_progress),
        plan_words(view, in_progress),
    )


def _described(action: Action) -> tuple[str, str, str, str, str]:
    return action_name(action), action.target, action.service, action.words, action.cause


def event_document(stored: StoredEvent) -> EventDocument:
    """Return one event with its number."""
    event = stored.event
    said = (event.at, event.kind, event.service, event.target, event.message, event.outcome)
    return EventDocument(stored.seq, *said, stored.last_at, stored.times)


# ----------------------------------------------------------------------------------------------------
# A container's log with its times as the engine returns it: one entry for each line.


_TIMED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z) ")


def key_document(key: ServiceKey, used_at: float | None = None) -> KeyDocument:
    """A key of clients, without its hash."""
    shown = {each.name: getattr(key, each.name) for each in fields(KeyDocument) if each.name != "used_at"}
    return KeyDocument(**shown, used_at=used_at)


def timed_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield (time, line) of a log whose lines begin with the engine's time stamp; "" for a line without one.

    A line of more than 16 KiB is logged in pieces, and the engine puts the same time stamp before each piece.
    """
    for raw in text.removesuffix("\n").split("\n") if text else ():
        match = _TIMED.match(raw)
        time, rest = (match[1], raw.replace(match[0], "")) if match else ("", raw)
        for line in rest.splitlines() or [""]:
            yield time, line


# ----------------------------------------------------------------------------------------------------
# HAProxy's routes, for GET /api/v1/routes.


def routes(view: View) -> Routes:
    """Return every route with the servers behind it."""
    routing = view.observed.routing
    services = view.desired.services if view.desired else {}
    haproxy = HAProxyProcess(routing.pid, routing.started_at, routing.version) if routing else None
    found = tuple(_route(*match, routing) for match in _matches(services.values()))
    return Routes(view.wall_time(view.at), haproxy, found)


def _matches(services: Collection[ServiceSpec]) -> Iterator[tuple[Literal["http", "grpc"], str, ServiceSpec]]:
    """Yield (protocol, what is matched, service)."""
    for spec in sorted((spec for spec in services if spec.route is not None), key=by_precedence):
        yield "http", spec.matched, spec
    by_name = [(name, spec) for spec in services for name in spec.grpc_services]
    for name, one in sorted(by_name, key=lambda named: named[0]):
        yield "grpc", name, one


def _route(protocol: Literal["http", "grpc"], match: str, spec: ServiceSpec, routing: RoutingState | None) -> Route:
    backend = backend_name(spec.name)
    return Route(
        protocol=protocol,
        match=match,
        application=spec.application if protocol == "grpc" else None,
        service=spec.name,
        strip_prefix=spec.strip_prefix and protocol == "http",
        in_haproxy=routing is not None and backend in routing.backends,
        queued=routing.queued.get(backend, 0) if routing else 0,
        servers=tuple(server for server in routing.servers if server.backend == backend) if routing else (),
    )
