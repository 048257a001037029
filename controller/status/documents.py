"""Builds the JSON documents of the API: a status row with its load, failures and refusals. Pure.

in_flight, waiting   requests in the service's replicas, and requests that wait for one (in callers and in HAProxy)
spec_replicas        the number in the compose files (with an autoscaler: the initial number)
failure              replicas that failed in a row: how many, when the last one failed (unix time), why
refusals             actions that failed and wait for their next try: what, how often, in how many seconds, why
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from ..desired.loads import loads
from ..model.actions import Action, action_name
from ..model.desired import Rejection
from ..model.plan import Refusal
from ..model.reports import ServiceStatus
from ..model.spec import ServiceSpec, backend_name
from ..model.world import RoutingState
from ..plan.user_config import progress_words
from ..storage.rows import StoredEvent
from .view import View

# ---------------------------------------------------------------------------------------------------------------- JSON


def service_json(row: ServiceStatus, view: View) -> dict[str, Any]:
    """Return a status row, with the service's settings from the spec."""
    spec = view.desired.services.get(row.name) if view.desired else None
    document = dataclasses.asdict(row)
    document |= {
        "at": view.wall_time(view.at),
        "engine_reachable": view.engine_reachable,
        "image": spec.image if spec else None,
        "protocol": spec.protocol if spec else None,
        "port": spec.port if spec else None,
        "route": spec.route if spec else None,
        "grpc_services": list(spec.grpc_services) if spec else [],
        "user_config": user_config_json(row, spec),
        **rollout_json(row, view),
    }
    return document | explanation(row.name, view)


def user_config_json(row: ServiceStatus, spec: ServiceSpec | None) -> dict[str, Any] | None:
    """Return a service's user_config and in how many replicas it is in force; None where there is none."""
    if row.user_config is None or spec is None:
        return None
    return {"value": json.loads(spec.user_config), **dataclasses.asdict(row.user_config)}


def rollout_json(row: ServiceStatus, view: View) -> dict[str, Any]:
    """Return a service's wanted version, and its rollout."""
    status = row.rollout
    if status is None:
        unknown: dict[str, Any] = {"version": None, "offered": None, "stable": None, "changes": [], "untried": False}
        return {**unknown, "rollout": None, "rejected": None}
    rollout = status.state.rollout
    return {
        "version": status.version or None,
        "offered": status.offered or None,
        "stable": status.state.stable,
        "changes": list(status.changes),
        "untried": status.state.is_unproven and not status.ready,
        "rollout": rollout
        and {
            "from": rollout.source,
            "to": rollout.to,
            "phase": rollout.phase,
            "since": view.wall_time(rollout.since),
            "begun_at": view.wall_time(rollout.begun_at),
            "cause": rollout.cause,
            "ready": status.ready,
            "wanted": row.wanted,
            "message": status.message,
        },
        "rejected": status.state.rejected and rejection_json(status.state.rejected, view),
    }


def rejection_json(rejection: Rejection, view: View) -> dict[str, Any]:
    """Return why a version was rejected. Setting the clock changes `at`, but not `id`."""
    at, number = view.wall_time(rejection.at), f"{rejection.version}@{rejection.at:.6f}"
    return {**dataclasses.asdict(rejection), "at": at, "id": number}


def log_json(replica: str, text: str) -> dict[str, Any]:
    """Return the last lines of a replica's log, and the engine's time of each."""
    entries = list(timed_lines(text))
    return {"name": replica, "lines": [line for _, line in entries], "times": [time for time, _ in entries]}


_OF_THE_LAST_GOOD = "the compose files cannot be used; what follows is the plan of the last good ones:"


def plan_words(view: View, in_progress: tuple[Action, ...]) -> str:
    """Return the plan as text, actions in progress first."""
    if view.desired is None and not view.spec_problems:
        return "no plan yet: the compose files have not been read"
    if view.desired is None:
        return "\n".join(["no plan: the compose files cannot be used", *view.spec_problems])
    unusable = [_OF_THE_LAST_GOOD, *view.spec_problems] if view.spec_problems else []
    doing = [f"in progress: {action.words}: {action.cause}" for action in in_progress]
    changes = [line for row in view.services for line in (*rollout_lines(row), *user_config_lines(row))]
    if (doing or changes) and not (view.plan.steps or view.plan.pending):
        return "\n".join([*unusable, *changes, *doing])
    return "\n".join([*unusable, *changes, *doing, str(view.plan)])


def rollout_lines(row: ServiceStatus) -> list[str]:
    """Return the changes that a rollout of the service makes, or would make, as a diff."""
    if row.rollout is None or not row.rollout.changes:
        return []
    message = row.rollout.message or f"{row.rollout.state.stable} -> {row.rollout.offered}"
    return [f"rollout of {row.name}: {message}", *(f"  {change}" for change in row.rollout.changes)]


def user_config_lines(row: ServiceStatus) -> list[str]:
    """Return the changes of a service's user_config, as a diff."""
    config = row.user_config
    if config is None or config.everywhere:
        return []
    lines = [f"user_config of {row.name}: {progress_words(config)}; no restart", *map("  {}".format, config.changes)]
    return [*lines, *map("  {}".format, config.refused)]


def plan_json(view: View, in_progress: tuple[Action, ...]) -> dict[str, Any]:
    """Return the plan as data; with spec_problems it is the plan of the last good files."""
    plan = view.plan
    return {
        "spec_problems": list(view.spec_problems),
        "steps": [
            {"number": step.number, "after": list(step.after), **_action_json(step.action)} for step in plan.steps
        ],
        "pending": [dataclasses.asdict(pending) for pending in plan.pending],
        "in_progress": [_action_json(action) for action in in_progress],
        "text": plan_words(view, in_progress),
    }


def _action_json(action: Action) -> dict[str, Any]:
    return {
        "action": action_name(action),
        "target": action.target,
        "service": action.service,
        "does": action.words,
        "cause": action.cause,
    }


def event_json(stored: StoredEvent) -> dict[str, Any]:
    """Return one event with its number."""
    return {
        "seq": stored.seq,
        **dataclasses.asdict(stored.event),
        "last_at": stored.last_at,
        "times": stored.times,
    }


def explanation(name: str, view: View) -> dict[str, Any]:
    """Return the fields that explain one service (see the module); null or empty where there is nothing to explain."""
    spec = view.desired.services.get(name) if view.desired else None
    load = loads([name], view.observed)[name] if view.observed else None
    records = view.observed.lasting_failures(name).values() if view.observed else ()
    record = max(records, key=lambda record: record.last_at, default=None)
    mine = [refusal for refusal in view.refusals if refusal.action.service == name]
    return {
        "in_flight": load.running if load else None,
        "waiting": load.waiting if load else None,
        "spec_replicas": spec.replicas if spec else None,
        "failure": {"count": record.count, "last_at": view.wall_time(record.last_at), "detail": record.detail}
        if record
        else None,
        "refusals": [_refusal(refusal, view.at) for refusal in mine],
    }


def _refusal(refusal: Refusal, now: float) -> dict[str, Any]:
    return {
        "does": refusal.action.words,
        "failures": refusal.failures,
        "retry_in_s": round(max(refusal.until - now, 0.0), 1),
        "error": str(refusal.error) or type(refusal.error).__name__,
    }


# ----------------------------------------------------------------------------------------------------
# A container's log with its times as the engine returns it: one entry for each line.


_TIMED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z) ")


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
        "application": spec.application if protocol == "grpc" else None,
        "service": spec.name,
        "strip_prefix": spec.strip_prefix and protocol == "http",
        "in_haproxy": routing is not None and backend in routing.backends,
        "queued": routing.queued.get(backend, 0) if routing else 0,
        "servers": [dataclasses.asdict(server) for server in servers],
    }
