"""Splits calls between versions while a canary gets a part of them. Pure.

Replicas of one weight are one group: the new version's, and the others. A group is drawn first, by the groups' shares,
and the policy then chooses within it. So the shares hold under every policy, and each group balances its own load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Weighed(Protocol):
    """A replica with a share of the calls."""

    @property
    def weight(self) -> int:
        """Relative to the others'; at least 1."""
        ...


W = TypeVar("W", bound=Weighed)


def differ(replicas: Iterable[Weighed]) -> bool:
    """Whether calls are to be shared by weight at all."""
    return len({replica.weight for replica in replicas}) > 1


def group(candidates: Sequence[W], draw: float) -> Sequence[W]:
    """The group that `draw`, from 0 to below 1, selects; it has at least one candidate."""
    point = draw * sum(candidate.weight for candidate in candidates)
    for weight in sorted({candidate.weight for candidate in candidates}):
        members = [candidate for candidate in candidates if candidate.weight == weight]
        point -= weight * len(members)
        if point < 0:
            break
    return members
