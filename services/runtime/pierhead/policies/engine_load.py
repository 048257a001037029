"""A policy that takes the less busy of two replicas by their engines' reports: a request of many samples, or with a
long context, is more work than one call, and only the engine knows.

A report is old when it arrives, and all callers may receive the same: they must not all choose the replica that looked
idle a second ago. So two are drawn at random, and calls made since then are added to the engine's report.
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
        """Forget its report."""
        self._reports.pop(name, None)

    def _busy(self, candidate: Candidate) -> tuple[float, float]:
        """Requests at the engine, and the share of its cache in use.

        Its report, plus the calls that began and minus the calls that ended since; never less than its calls in flight.
        """
        stats, load = candidate.stats, candidate.load
        if "running" not in stats and "waiting" not in stats:
            return load, stats.get("kv_use", 0.0)
        report = self._reports.get(candidate.name)
        if report is None or report[0] is not stats:
            report = self._reports[candidate.name] = (stats, load)
        said = stats.get("running", 0.0) + stats.get("waiting", 0.0)
        return max(load, said + load - report[1]), stats.get("kv_use", 0.0)
