"""How the edges share `max_ongoing_requests`: how many requests each of them sends to a replica at a time. Pure.

Why: docs/decisions/swarm.md#edges-share-max_ongoing_requests-by-need-max-min-fair. All shares together are the
service's limit; each edge has at least one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """How one edge uses its share of a service."""

    share: int
    """In force at its servers: the greatest; 0 = it has no server yet."""
    busiest: int = 0
    """Requests at the server that has most of them from this edge."""
    wanted: int = 0
    """Requests that it has at all servers, and that wait in its queues."""
    servers: int = 0
    is_waiting: bool = False
    """Whether requests wait in its queues."""
    is_away: bool = False
    """It does not answer: its share cannot be changed, and may be in use."""


def fair(limit: int, needs: Mapping[str, int]) -> dict[str, int]:
    """Divide a limit among edges (at least one) by the places that each needs: max-min fair.

    No edge gets more than it needs while another lacks what an equal share would give it. What no edge needs goes to
    the smallest shares. The shares add up to the limit, or to the number of edges if that is greater.
    """
    total = max(limit, len(needs))
    has_enough = sum(max(1, need) for need in needs.values()) <= total

    def share(need: int, level: int) -> int:
        return max(1, need, level) if has_enough else max(1, min(need, level))

    def width(level: int) -> int:
        return sum(share(need, level) for need in needs.values())

    level = bisect_right(range(total + 1), total, key=width) - 1
    shares = {edge: share(need, level) for edge, need in needs.items()}
    left = total - sum(shares.values())
    for edge in sorted(needs):
        if left and share(needs[edge], level + 1) > shares[edge]:
            shares[edge] += 1
            left -= 1
    return shares


def next_shares(limit: int, uses: Mapping[str, Use]) -> dict[str, int]:
    """The shares to set now, of the edges that answer.

    They move only when requests wait, an edge came or went, or the limit changed. A share that shrinks does so at once;
    one that grows gets only places that no other edge has or uses, so at no time do all shares exceed the limit (but
    for one place of an edge that has just come).
    """
    here = {edge: use for edge, use in uses.items() if not use.is_away}
    if not here:
        return {}
    total = max(limit - sum(use.share for use in uses.values() if use.is_away), len(here))
    is_settled = all(use.share for use in here.values()) and sum(use.share for use in here.values()) == total
    if is_settled and not any(use.is_waiting for use in here.values()):
        return {edge: use.share for edge, use in here.items()}
    goal = fair(total, {edge: _need(use) for edge, use in here.items()})
    in_force = {edge: max(use.share, use.busiest) for edge, use in uses.items()}
    shares = {}
    for edge in sorted(here):
        free = limit - sum(taken for other, taken in in_force.items() if other != edge)
        shares[edge] = goal[edge]
        if goal[edge] > here[edge].share:
            shares[edge] = max(min(goal[edge], free), here[edge].share, 1)
            in_force[edge] = max(in_force[edge], shares[edge])
    return shares


def _need(use: Use) -> int:
    """Places at each server for what the edge has, and one more for what comes next."""
    return math.ceil(use.wanted / use.servers) + 1 if use.servers else 1
