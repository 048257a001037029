"""Policies that even out load: power of two choices, round robin, least ongoing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from random import Random

from pierhead.policies.policy import C, RoutedCall


def two_of(candidates: Sequence[C], random: Callable[[], float]) -> tuple[C, C]:
    """Two different candidates, at random; there have to be at least two."""
    count = len(candidates)
    first = int(random() * count)
    second = int(random() * (count - 1))
    return candidates[first], candidates[second + (second >= first)]


class PowerOfTwo:
    """Draws two at random and takes the less loaded: nearly as even as comparing all, and callers do not herd."""

    def __init__(self, rng: Random) -> None:
        self._random = rng.random

    def choose(self, candidates: Sequence[C], _: RoutedCall) -> C:
        """The less loaded of two; the first drawn when both are equal."""
        if len(candidates) == 1:
            return candidates[0]
        one, other = two_of(candidates, self._random)
        return other if other.load < one.load else one


class RoundRobin:
    """Takes candidates in turn by name; replicas that come and go do not restart the round."""

    def __init__(self, _: Random) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[C], _: RoutedCall) -> C:
        """The candidate after the last one chosen."""
        after = bisect_right(candidates, self._last, key=name_of)
        chosen = candidates[after if after < len(candidates) else 0]
        self._last = chosen.name
        return chosen


class LeastOngoing:
    """Takes the least loaded candidate; a random one of several."""

    def __init__(self, rng: Random) -> None:
        self._random = rng.random

    def choose(self, candidates: Sequence[C], _: RoutedCall) -> C:
        """The least loaded one."""
        least = min(map(load_of, candidates))
        equals = [candidate for candidate in candidates if candidate.load == least]
        return equals[int(self._random() * len(equals))]


name_of = attrgetter("name")
load_of = attrgetter("load")
