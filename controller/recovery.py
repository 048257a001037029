"""When a service's failures are forgiven. Pure."""

from __future__ import annotations

from collections.abc import Callable

from controller.model import Desired, FailureRecord, Health, Observed

STEADY_S = 60.0


def recovered(
    desired: Desired, observed: Observed, ready_since: Callable[[str], float | None], now: float
) -> frozenset[str]:
    """Return services whose failure record is out of date.

    A service has recovered once a replica that became ready after its last failure has been ready for STEADY_S: a
    healthy sibling says nothing about a replica that crashes. Or once it has had all it wants, ready, for that long.
    """
    return frozenset(
        service
        for service, failure in observed.failures.items()
        if _has_recovered(service, failure, desired, observed, ready_since, now)
    )


def _has_recovered(
    service: str,
    failure: FailureRecord,
    desired: Desired,
    observed: Observed,
    ready_since: Callable[[str], float | None],
    now: float,
) -> bool:
    replicas = [c for c in observed.containers if c.service == service and c.id not in observed.retirements]
    times = [since for c in replicas if c.health is Health.READY and (since := ready_since(c.id)) is not None]
    if any(since >= failure.last_at and now - since >= STEADY_S for since in times):
        return True
    complete = len(times) == len(replicas) >= desired.targets.get(service, 0)
    return complete and now - failure.last_at >= STEADY_S and all(now - since >= STEADY_S for since in times)
