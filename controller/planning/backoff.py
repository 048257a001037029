"""How long a version that failed is not tried again."""

from __future__ import annotations

import math

from controller.model import FailureRecord, is_another_try
from controller.planning.draft import Draft

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
    """How often a version has failed by now. What is kept counts a replica when it is gone, this also before."""
    failure = draft.observed.failures.get((service, version))
    for action in draft.failed:
        if (action.service, action.version) == (service, version) and is_another_try(failure, action.began_at):
            return FailureRecord(failure.count + 1 if failure else 1, draft.now, action.cause)
    return failure
