"""Which replica gets a call. To add a policy: a class with `choose`, and one `register_policy` line.

A policy is asked with the replicas that may be called now and have room: never with a draining, disconnected or full
one, and never with none. It reads their load, chooses, and does nothing else: no I/O, no clock, no logging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a policy may know of a replica."""

    @property
    def name(self) -> str:
        """The replica's name; unique among the candidates, which come sorted by it."""
        ...

    @property
    def load(self) -> int:
        """Calls in flight there: this process's own, plus what the replica's replies say of others'."""
        ...


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Chooses a replica for one call."""

    def choose(self, candidates: Sequence[C]) -> C:
        """One of `candidates`, which holds at least one."""
        ...


class PowerOfTwo:
    """Draws two at random and takes the less loaded: nearly as even as asking all, and callers do not herd."""

    def __init__(self, rng: Random) -> None:
        self._random = rng.random

    def choose(self, candidates: Sequence[C]) -> C:
        """The less loaded of two; the first drawn when both are equal."""
        count = len(candidates)
        if count == 1:
            return candidates[0]
        first = int(self._random() * count)
        second = int(self._random() * (count - 1))
        if second >= first:
            second += 1
        one, other = candidates[first], candidates[second]
        return other if other.load < one.load else one


class RoundRobin:
    """Takes them in turn by name; replicas that come and go do not restart the round."""

    def __init__(self, _: Random) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[C]) -> C:
        """The first one after the one chosen last."""
        chosen = next((candidate for candidate in candidates if candidate.name > self._last), candidates[0])
        self._last = chosen.name
        return chosen


class LeastOngoing:
    """Takes the least loaded of all; any of them when several are."""

    def __init__(self, rng: Random) -> None:
        self._choice = rng.choice

    def choose(self, candidates: Sequence[C]) -> C:
        """The least loaded one."""
        least = min(candidate.load for candidate in candidates)
        return self._choice([candidate for candidate in candidates if candidate.load == least])


_REGISTRY: dict[str, Callable[[Random], Policy]] = {}


def register_policy(name: str, make: Callable[[Random], Policy]) -> None:
    """Make a policy known to `handle(..., policy=name)`. Each handle gets an object of its own."""
    if name in _REGISTRY:
        raise ValueError(f'policy "{name}" is already registered')
    _REGISTRY[name] = make


def make_policy(name: str, rng: Random) -> Policy:
    """A new policy object. Raises ValueError that lists what there is."""
    make = _REGISTRY.get(name)
    if make is None:
        raise ValueError(f'policy: expected one of {", ".join(sorted(_REGISTRY))}, found "{name}"')
    return make(rng)


register_policy("power_of_two", PowerOfTwo)
register_policy("round_robin", RoundRobin)
register_policy("least_ongoing", LeastOngoing)
