"""Computes the limits of a rolling update: how many replicas of each version there may be. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ..model.spec import RolloutSpec

MOST_WEIGHT = 256
"""HAProxy's greatest weight of a server."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits at one moment of a rolling update."""

    floor: int
    """The least number of ready replicas, of any version."""
    ceiling: int
    """The greatest number of replicas of all versions; leaving ones do not count."""
    goal: int
    """Replicas of the new version that are wanted now."""
    keep: int
    """Replicas of the former version that may stay with the first batch of the new one."""
    one_by_one: bool = False
    """No replica can be started before another has gone: there is no GPU for one more."""


def bounds(
    target: int,
    rollout: RolloutSpec,
    *,
    on_trial: bool,
    room: int | None = None,
    reachable: int | None = None,
    has_place: bool = True,
) -> Bounds:
    """Return the bounds for `target` replicas.

    `on_trial`: only the first batch of the new version is to start, the former version keeps serving. `room`: how many
    replicas the machine's GPUs can hold, the present ones and more of the new version; None = any number. `reachable`:
    how many of `target` there can be of any version; None = as many as there is room for. `has_place`: whether a
    replica of the new version fits once all replicas that may leave have left.

    If nothing fits next to the present replicas, one of several leaves before its successor starts, even with
    `max_unavailable: 0`: the update would wait forever otherwise. A single replica stays, as no other could answer
    until then. If the successor would find no place even then, no replica leaves, whatever `max_unavailable` says.
    """
    surge = rollout.max_surge if room is None else max(0, min(rollout.max_surge, room - target))
    unavailable = rollout.max_unavailable if has_place else 0
    stuck = not surge and not unavailable
    if reachable is None:
        reachable = target if room is None else min(target, room)
    one_by_one = stuck and reachable > 1 and has_place
    if one_by_one:
        unavailable = 1
    batch = min(target, max(surge, unavailable, 1))
    return Bounds(
        # Several replicas may leave for one that asks for more GPUs, so `reachable` falls on the way. It therefore
        # limits only one at a time, not how many may be missing.
        floor=max(0, min(target - unavailable, reachable - 1)) if unavailable else reachable,
        # A replica that does not fit is planned nevertheless: the attempt reports the obstacle.
        ceiling=target + max(surge, int(stuck and not one_by_one)),
        goal=batch if on_trial else target,
        keep=max(0, reachable + min(0, surge - batch) if has_place else reachable) if on_trial and target else 0,
        one_by_one=one_by_one,
    )


def weights(percent: int | None, new: int, old: int) -> tuple[int, int]:
    """Weights of a new and of an old server, so that `new` new servers together get `percent` of the requests.

    1 and 1 where no percentage is set, or one of the versions has no server.
    """
    if percent is None or not new or not old:
        return 1, 1
    ratio = Fraction(percent * old, (100 - percent) * new)  # new weight to old weight
    if ratio > 1:
        of_old, of_new = _near(1 / ratio)
    else:
        of_new, of_old = _near(ratio)
    return of_new, of_old


def _near(ratio: Fraction) -> tuple[int, int]:
    """Two weights of nearly that ratio, which is at most 1."""
    if ratio * MOST_WEIGHT <= 1:
        return 1, MOST_WEIGHT
    near = ratio.limit_denominator(MOST_WEIGHT)
    return near.numerator, near.denominator
