"""The less busy of two replicas, by what their engines say: a request of many samples, or with a long context, is more
than one call, and only the engine knows.

What an engine says is old when it arrives, and all callers may receive the same: they must not all choose the replica
that looked idle a second ago. So two are drawn at random, and calls made since then are added to what the engine said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from pierhead.policies.balanced import two_of
from pierhead.policies.policy import C, Candidate, RoutedCall


class EngineLoad:
    """Reads `running`, `waiting` and `kv_use` of `Candidate.stats`; replicas without them count by load."""

    def __init__(self, rng: Random) -> None:
        self._random = rng.random
        self._reports: dict[str, tuple[Mapping[str, float], int]] = {}
        """Each replica's last report, and how many calls were there when it was first seen."""

    def choose(self, candidates: Sequence[C], _: RoutedCall) -> C:
        """The less busy of two; of equally busy ones, the one with more free cache, and then the first drawn."""
        if len(candidates) == 1:
            return candidates[0]
        one, other = two_of(candidates, self._random)
        return other if self._busy(other) < self._busy(one) else one

    def on_replica_gone(self, name: str) -> None:
        """Forget what it said."""
        self._reports.pop(name, None)

    def _busy(self, candidate: Candidate) -> tuple[float, float]:
        """Requests at the engine, and the share of its cache in use.

        What it reported, plus the calls that came and less those that ended since; never less than the calls there.
        """
        stats, load = candidate.stats, candidate.load
        if "running" not in stats and "waiting" not in stats:
            return load, stats.get("kv_use", 0.0)
        report = self._reports.get(candidate.name)
        if report is None or report[0] is not stats:
            report = self._reports[candidate.name] = (stats, load)
        said = stats.get("running", 0.0) + stats.get("waiting", 0.0)
        return max(load, said + load - report[1]), stats.get("kv_use", 0.0)
