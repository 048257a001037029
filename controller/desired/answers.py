"""How many requests each version of a service has answered since a rollout began, and how many with an error. Pure.

Replicas count since their own start. What an old one had counted before the rollout began is taken off, so that both
versions are compared over the same time; only where that leaves too little to compare, its whole life counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..model.observed import Observed
from ..model.world import ReplicaContainer
from .rollout import Tally

ENOUGH = 20
"""Answers of the former version below which its time before the rollout counts, too."""


@dataclass(slots=True)
class _Replica:
    version: str
    tells: bool
    """It counts itself; HAProxy's count is then never taken, which begins anew with every reload."""
    before: Tally
    """What it had counted when the rollout began."""
    last: Tally
    gained: Tally = field(default_factory=Tally)
    """Since then. A count that went back has begun anew (a worker process, HAProxy), so all of it is gain."""

    def note(self, now: Tally) -> None:
        begun_anew = now.answered < self.last.answered or now.errors < self.last.errors
        since = Tally() if begun_anew else self.last
        self.gained = _sum([self.gained, Tally(now.answered - since.answered, now.errors - since.errors)])
        self.last = now


class Answers:
    """The book of one service's rollout. Replicas that have left stay in it."""

    def __init__(self, to: str, begun_at: float) -> None:
        self.to = to
        self.begun_at = begun_at
        self._replicas: dict[str, _Replica] = {}

    def look(self, containers: Iterable[ReplicaContainer], observed: Observed) -> None:
        """Note what the replicas of the service have counted by now."""
        for container in containers:
            known = self._replicas.get(container.id)
            own = own_count(container)
            now = own if own is not None or (known and known.tells) else edge_count(container, observed)
            if now is None:
                continue  # it has just begun, does not answer any more, or nobody counts
            if known is None:
                # Of an earlier attempt with the same version: what it answered then was judged then.
                is_new = container.version == self.to and container.created_at >= self.begun_at
                before = Tally() if is_new else now
                known = _Replica(container.version, own is not None, before, before)
                self._replicas[container.id] = known
            known.note(now)

    def of(self, version: str) -> Tally:
        """Answers of that version since the rollout began."""
        mine = [replica for replica in self._replicas.values() if replica.version == version]
        gained = _sum(replica.gained for replica in mine)
        if version == self.to or gained.answered >= ENOUGH:
            return gained
        return _sum([gained, *(replica.before for replica in mine)])

    def versions(self) -> frozenset[str]:
        """Versions that have an entry."""
        return frozenset(replica.version for replica in self._replicas.values())


def own_count(container: ReplicaContainer) -> Tally | None:
    """What a replica says that it has answered since its start."""
    if container.answered is None or container.errors is None:
        return None
    return Tally(container.answered, container.errors)


def edge_count(container: ReplicaContainer, observed: Observed) -> Tally | None:
    """What HAProxy has seen of its answers; None where it has no server of it."""
    server = observed.routing.server_of(container.service, container.name) if observed.routing else None
    return Tally(server.answered, server.errors) if server else None


def _sum(tallies: Iterable[Tally]) -> Tally:
    answered = errors = 0
    for tally in tallies:
        answered += tally.answered
        errors += tally.errors
    return Tally(answered, errors)
