"""Which replicas a call for a model prefers. The policy then chooses among those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class HoldsModels(Protocol):
    """What is asked of a candidate; see `pierhead.policies.Candidate`."""

    @property
    def models(self) -> frozenset[str]:
        """The models that it holds or loads, by its own last word."""
        ...


C = TypeVar("C", bound=HoldsModels)


def prefer_holders(candidates: Sequence[C], model_id: str) -> Sequence[C]:
    """Those that hold the model; else those with the fewest models, which have to unload none or are far from it.

    Candidates have room, so a call goes to another replica when every holder is full: it loads the model there, and
    from then on both take calls for it. All are equal where nothing is multiplexed. Keeps the order; never empty
    unless `candidates` is.
    """
    holders = [candidate for candidate in candidates if model_id in candidate.models]
    if holders:
        return holders
    counts = [len(candidate.models) for candidate in candidates]
    fewest = min(counts, default=0)
    if max(counts, default=0) == fewest:
        return candidates
    return [candidate for candidate, count in zip(candidates, counts, strict=True) if count == fewest]
