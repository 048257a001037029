"""The one replica of a name: for calls of every replica (`pierhead.classes.handles.each_replica`)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pierhead.policies.policy import C


class Named:
    """A policy: the call waits for this replica, and goes to no other."""

    waits_for_named = True

    def __init__(self, rng: Random, replica: str) -> None:
        self._replica = replica

    async def choose(self, candidates: Sequence[C], call: Any) -> Sequence[Sequence[C]]:
        """See `pierhead.policies.policy`. Raises LookupError when the replica has gone."""
        found = [each for each in candidates if each.name == self._replica]
        if not found:
            raise LookupError(f"the replica {self._replica} has gone")
        return [found]
