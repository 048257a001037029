"""When a service's failures are forgiven. Pure."""

from __future__ import annotations

from collections.abc import Callable

from controller.model import Desired, FailureKey, FailureRecord, Health, Observed

STEADY_S = 60.0


def recovered(
    desired: Desired, observed: Observed, ready_since: Callable[[str], float | None], now: float
) -> frozenset[FailureKey]:
    """Return services and versions whose failure record is out of date.

    A version has recovered once a replica that became ready after its last failure has been ready for STEADY_S: a
    healthy sibling says nothing about a replica that crashes. Or once its service has had all it wants, ready, for that
    long.
    """
    return frozenset(
        key
        for key, failure in observed.failures.items()
        if _has_recovered(key, failure, desired, observed, ready_since, now)
    )


def _has_recovered(
    key: FailureKey,
    failure: FailureRecord,
    desired: Desired,
    observed: Observed,
    ready_since: Callable[[str], float | None],
    now: float,
) -> bool:
    service, version = key
    replicas = [c for c in observed.containers_of(service) if c.id not in observed.retirements]
    times = [
        (container.version, since)
        for container in replicas
        if container.health is Health.READY and (since := ready_since(container.id)) is not None
    ]
    if any(made_as == version and since >= failure.last_at and now - since >= STEADY_S for made_as, since in times):
        return True
    complete = len(times) == len(replicas) >= desired.targets.get(service, 0)
    return complete and now - failure.last_at >= STEADY_S and all(now - since >= STEADY_S for _, since in times)
