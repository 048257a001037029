"""Documents of the API as the command gets them, for tests that need no controller behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiohttp import web

from controller.status.reasons import explained
from controller.status.records.answers import EventDocument
from controller.status.records.services import (
    GpuUse,
    NodeStatus,
    RejectionDocument,
    ReplicaStatus,
    RolloutDocument,
    Service,
    Services,
)
from controller.tool.output import json_text

AT = 1_800_000_000.0
UUID = "GPU-3f2c1b0a-4d5e-6f70-8192-a3b4c5d6e7f8"
REJECTED = RejectionDocument("9f8e7d6c", "its replicas failed 3 times", AT - 500, False, False, "9f8e7d6c@0")

EXPLAINED: dict[str, Any] = {"obstacles": (), "who_decides": "", "summary": "", "stuck": None, "not_as_asked": None}


def answered(document: object, status: int = 200) -> web.Response:
    """The API's answer."""
    return web.json_response(text=json_text(document), status=status)


def replica(name: str, state: str = "RUNNING", **changes: Any) -> ReplicaStatus:
    running = {"address": "172.18.0.7:8080", "ongoing": 0} if name else {"address": "", "ongoing": None}
    rest = {"version": "1a2b3c4d", "gpus": (), "message": "", "node": "", **running}
    return ReplicaStatus(name=name, state=state, **{**rest, **changes})  # type: ignore[arg-type]


def row(name: str = "web", **changes: Any) -> Service:
    """A service that has what it wants; replicas are made up to match `ready`."""
    ready = changes.get("ready", 2)
    plain: dict[str, Any] = {
        "name": name,
        "wanted": 2,
        "ready": 2,
        "message": "",
        "converged": True,
        "blocked": "",
        "override": None,
        "autoscale": None,
        "replicas": tuple(replica(f"p-{name}-1a2b3c4d-{number}") for number in range(1, ready + 1)),
        "at": AT,
        "image": f"pierhead/{name}:latest",
        "protocol": "http",
        "port": 8080,
        "route": f"/{name}",
        "grpc_services": (),
        "models": (),
        "in_flight": 0,
        "waiting": 0,
        "spec_replicas": 2,
        "failure": None,
        "refusals": (),
        "user_config": None,
        "calls": (),
        "unknown_callees": {},
        "unreached": (),
        "engine_reachable": True,
        "version": "1a2b3c4d",
        "offered": "1a2b3c4d",
        "stable": "1a2b3c4d",
        "changes": (),
        "untried": False,
        "rollout": None,
        "rejected": None,
    }
    document = {**plain, **changes}
    return explained(Service(**{"state": _state(document), **EXPLAINED, **document}))


def _state(document: dict[str, Any]) -> str:
    if document["converged"]:
        return "HEALTHY"
    if document["blocked"] or document["failure"]:
        return "UNHEALTHY"
    return "UPSCALING" if document["ready"] < document["wanted"] else "UPDATING"


def gpu(uuid: str, **changes: Any) -> GpuUse:
    """A GPU whose memory is not known."""
    return replace(GpuUse(uuid, "", "", (), None, None, None, "", ""), **changes)


def node(name: str, **changes: Any) -> NodeStatus:
    """A node that is well, with one of its two GPUs in use."""
    return replace(NodeStatus(name, "worker", "ready", "active", "10.77.0.1", {}, 1, 2, 1, "", ""), **changes)


def rolling(
    name: str = "ranker",
    phase: str = "ROLLING",
    message: str = "1a2b3c4d -> 9f8e7d6c: 1 of 2 replaced",
    **changes: Any,
) -> Service:
    """A service in the middle of a rollout."""
    rollout = RolloutDocument(
        "1a2b3c4d", "9f8e7d6c", phase, AT - 60, AT - 60, "", 1, 2, message, f"{phase}, 1 of 2 ready"
    )
    fields = {"state": "UPDATING", "version": "9f8e7d6c", "rollout": rollout, "converged": False}
    return row(name, **{**fields, "message": message, **changes})


def settled(name: str = "ranker", version: str = "9f8e7d6c", **changes: Any) -> Service:
    """The same service without a rollout."""
    return row(name, **{"state": "HEALTHY", "version": version, **changes})


def document(*rows: Service, **changes: Any) -> Services:
    return replace(Services("p", AT, rows, (), (), None, "", (), (), True, True, True), **changes)


def event(message: str, kind: str = "create_container", **changes: Any) -> EventDocument:
    at = AT - 30
    return replace(EventDocument(1, at, kind, "web", "p-web-1a2b3c4d-1", message, "ok", at, 1), **changes)
