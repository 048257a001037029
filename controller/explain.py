"""What an API document adds to a status row so that a person can be told why: the load, failures, refusals. Pure.

in_flight, waiting   requests in its replicas, and those that wait for one (in callers and in HAProxy)
spec_replicas        what the compose files say (with an autoscaler: what it begins with)
failure              replicas that failed in a row: how many, when the last one (unix time), why
refusals             actions that failed and wait for their next try: what, how often, in how many seconds, why
"""

from __future__ import annotations

from typing import Any

from controller.apply import Refusal
from controller.loads import loads
from controller.model import FailureRecord
from controller.plan_text import describe
from controller.status import View


def explanation(name: str, view: View) -> dict[str, Any]:
    """Return these fields of one service; null or empty where there is nothing to tell."""
    spec = view.desired.services.get(name) if view.desired else None
    load = loads([name], view.observed)[name] if view.observed else None
    records = view.observed.failures.items() if view.observed else ()
    record = max((record for (service, _), record in records if service == name), key=_latest, default=None)
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


def _latest(record: FailureRecord) -> float:
    return record.last_at


def _refusal(refusal: Refusal, now: float) -> dict[str, Any]:
    return {
        "does": describe(refusal.action),
        "failures": refusal.failures,
        "retry_in_s": round(max(refusal.until - now, 0.0), 1),
        "error": str(refusal.error) or type(refusal.error).__name__,
    }
