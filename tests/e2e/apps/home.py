"""A policy whose callers share one choice: the replica that `home` in the shared store names."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pierhead import StoreUnavailable, shared_store
from pierhead.policies.policy import Candidate, RoutedCall


class Home:
    def __init__(self, rng: Random) -> None:
        pass

    async def choose(self, candidates: Sequence[Candidate], call: RoutedCall) -> list[list[Candidate]]:
        try:
            home = await shared_store.get("home")
        except StoreUnavailable:
            return []
        return [[one for one in candidates if one.name == home], [one for one in candidates if one.name != home]]
