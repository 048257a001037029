"""The backoff of versions that failed, and when it ends. Pure."""

from __future__ import annotations

import math

from ..model.desired import Desired, goal_of
from ..model.observed import Observed
from ..model.world import FailureKey, FailureRecord, ReplicaHealth, is_another_try
from .draft import Draft

BACKOFF_MAX_S = 60.0


def backoff_s(failures: int) -> float:
    """Seconds between a failure and the next start: none after the first, then 1, 2, 4 ... up to 60."""
    return 0.0 if failures <= 1 else min(BACKOFF_MAX_S, 2.0 ** (failures - 2))


def backing_off(draft: Draft, service: str, version: str) -> str | None:
    """Return why a version that failed is not started again yet, or None."""
    failure = _failure(draft, service, version)
    if failure is None:
        return None
    left_s = failure.last_at + backoff_s(failure.count) - draft.now
    if left_s <= 0:
        return None
    draft.look_again_in(left_s)
    return f"failed {failure.count} times in a row, next try in {math.ceil(left_s)} s; last: {failure.detail}"


def _failure(draft: Draft, service: str, version: str) -> FailureRecord | None:
    """A version's failures. The store counts a failed replica when it is removed; this counts it before that, too."""
    failure = draft.observed.failures.get((service, version))
    for action in draft.failed:
        if (action.service, action.version) == (service, version) and is_another_try(failure, action.began_at):
            return FailureRecord(failure.count + 1 if failure else 1, draft.now, action.cause)
    return failure


# ----------------------------------------------------------------------------------------------------
# When failure records are cleared.


STEADY_S = 60.0


def obsolete_failures(desired: Desired, observed: Observed, now: float) -> frozenset[FailureKey]:
    """Return failure records of versions that work again, or that no service wants any more."""
    wanted = {
        (name, version)
        for name in desired.services
        for goal in [goal_of(desired, observed, name)]
        for version in (goal.version, goal.keep)
    }
    present = {(container.service, container.version) for container in observed.containers}
    return frozenset(
        key
        for key, failure in observed.failures.items()
        if key not in wanted | present or _has_recovered(key, failure, desired, observed, now)
    )


def _has_recovered(key: FailureKey, failure: FailureRecord, desired: Desired, observed: Observed, now: float) -> bool:
    """Whether a version has recovered from its last failure.

    It has when a replica that became ready after that failure has been ready for STEADY_S (an older ready replica does
    not show that a new one works), or when all replicas that the service wants have been ready for that long.
    """
    service, version = key
    replicas = [c for c in observed.containers_of(service) if c.id not in observed.retirements]
    times = [
        (container.version, container.ready_since)
        for container in replicas
        if container.health is ReplicaHealth.READY and container.ready_since is not None
    ]
    if any(made_as == version and since >= failure.last_at and now - since >= STEADY_S for made_as, since in times):
        return True
    complete = len(times) == len(replicas) >= desired.targets.get(service, 0)
    return complete and now - failure.last_at >= STEADY_S and all(now - since >= STEADY_S for _, since in times)
