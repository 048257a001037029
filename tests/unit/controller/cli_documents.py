"""Documents of the API as the command gets them, for tests that need no controller behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AT = 1_800_000_000.0
UUID = "GPU-3f2c1b0a-4d5e-6f70-8192-a3b4c5d6e7f8"


REJECTED = {
    "version": "9f8e7d6c",
    "reason": "its replicas failed 3 times",
    "at": AT - 500,
    "is_asked": False,
    "is_refused": False,
    "id": "9f8e7d6c@0",
}


def replica(name: str, state: str = "RUNNING", **changes: Any) -> dict[str, Any]:
    running = {"address": "172.18.0.7:8080", "ongoing": 0} if name else {"address": "", "ongoing": None}
    rest = {"gpus": [], "message": "", "node": "", **running}
    return {"name": name, "state": state, "version": "1a2b3c4d", **rest, **changes}


def row(name: str = "web", **changes: Any) -> dict[str, Any]:
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
        "replicas": [replica(f"p-{name}-1a2b3c4d-{number}") for number in range(1, ready + 1)],
        "at": AT,
        "image": f"pierhead/{name}:latest",
        "protocol": "http",
        "port": 8080,
        "route": f"/{name}",
        "grpc_services": [],
        "in_flight": 0,
        "waiting": 0,
        "spec_replicas": 2,
        "failure": None,
        "refusals": [],
        "user_config": None,
        "unknown_callees": {},
        "engine_reachable": True,
        "version": "1a2b3c4d",
        "offered": "1a2b3c4d",
        "stable": "1a2b3c4d",
        "changes": [],
        "untried": False,
        "rollout": None,
        "rejected": None,
    }
    document = {**plain, **changes}
    return {"state": _state(document), **document}


def _state(document: Mapping[str, Any]) -> str:
    if document["converged"]:
        return "HEALTHY"
    if document["blocked"] or document["failure"]:
        return "UNHEALTHY"
    return "UPSCALING" if document["ready"] < document["wanted"] else "UPDATING"


def gpu(uuid: str, **changes: Any) -> dict[str, Any]:
    """A GPU whose memory is not known."""
    unknown = {"memory_bytes": None, "used_bytes": None, "free_bytes": None}
    return {"uuid": uuid, "name": "", "holder": "", "slots": [], "fault": "", "node": "", **unknown, **changes}


def node(name: str, **changes: Any) -> dict[str, Any]:
    """A node that is well, with one of its two GPUs in use."""
    plain = {"role": "worker", "state": "ready", "availability": "active", "address": "10.77.0.1", "labels": {}}
    counts = {"replicas": 1, "gpus": 2, "gpus_used": 1}
    return {"name": name, **plain, **counts, "message": "", "blocked": "", **changes}


def rolling(name: str = "ranker", **changes: Any) -> dict[str, Any]:
    """A service in the middle of a rollout."""
    rollout = {"from": "1a2b3c4d", "to": "9f8e7d6c", "phase": "ROLLING", "since": AT - 60, "ready": 1, "wanted": 2}
    message = changes.get("message", "1a2b3c4d -> 9f8e7d6c: 1 of 2 replaced")
    rollout |= {"phase": changes.pop("phase", "ROLLING"), "message": message}
    fields = {"state": "UPDATING", "version": "9f8e7d6c", "rollout": rollout, "converged": False, "message": message}
    return row(name, **{**fields, **changes})


def settled(name: str = "ranker", version: str = "9f8e7d6c", **changes: Any) -> dict[str, Any]:
    """The same service without a rollout."""
    return row(name, **{"state": "HEALTHY", "version": version, **changes})


def document(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    problems = {"spec_problems": [], "notices": [], "gpu_memory_problem": ""}
    seen = {"settled": True, "files_current": True, "engine_reachable": True}
    return {"project": "p", "at": AT, "services": list(rows), "gpus": [], "nodes": [], **problems, **seen, **changes}


def event(message: str, kind: str = "create_container", **changes: Any) -> dict[str, Any]:
    about = {"seq": 1, "kind": kind, "service": "web", "target": "p-web-1a2b3c4d-1", "message": message}
    return {**about, "outcome": "ok", "at": AT - 30, "last_at": AT - 30, "times": 1, **changes}
