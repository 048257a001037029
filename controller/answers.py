"""How many requests each version of a service has answered since a rollout began, and how many with an error. Pure.

Replicas count since their own start. What an old one had counted before the rollout began is taken off, so that both
versions are compared over the same time; only where that leaves too little to compare, its whole life counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controller.model import Observed, ReplicaContainer
from controller.rollout import Tally

ENOUGH = 20
"""Answers of the former version below which its time before the rollout counts, too."""


@dataclass(slots=True)
class _Replica:
    version: str
    before: Tally
    latest: Tally

    def since_begin(self) -> Tally:
        """A count that went back (a worker process was replaced) is taken as it is."""
        if self.latest.answered < self.before.answered or self.latest.errors < self.before.errors:
            return self.latest
        return Tally(self.latest.answered - self.before.answered, self.latest.errors - self.before.errors)


class Answers:
    """The book of one service's rollout. Replicas that have left stay in it."""

    def __init__(self, to: str, begun_at: float) -> None:
        self.to = to
        self.begun_at = begun_at
        self._replicas: dict[str, _Replica] = {}

    def look(self, containers: Iterable[ReplicaContainer], observed: Observed) -> None:
        """Note what the replicas of the service have counted by now."""
        for container in containers:
            now = counted(container, observed)
            if now is None:
                continue
            known = self._replicas.get(container.id)
            if known is None:
                before = Tally() if container.version == self.to else now
                self._replicas[container.id] = _Replica(container.version, before, now)
            else:
                known.latest = now

    def of(self, version: str) -> Tally:
        """Answers of that version since the rollout began."""
        mine = [replica for replica in self._replicas.values() if replica.version == version]
        found = _sum(replica.since_begin() for replica in mine)
        if version == self.to or found.answered >= ENOUGH:
            return found
        return _sum(replica.latest for replica in mine)

    def versions(self) -> frozenset[str]:
        """Versions that have an entry."""
        return frozenset(replica.version for replica in self._replicas.values())


def counted(container: ReplicaContainer, observed: Observed) -> Tally | None:
    """What a replica has answered since its start: by its own count, else by HAProxy's; None where nobody counts."""
    if container.answered is not None and container.errors is not None:
        return Tally(container.answered, container.errors)
    server = observed.routing.server_of(container.service, container.name) if observed.routing else None
    return Tally(server.answered, server.errors) if server else None


def _sum(tallies: Iterable[Tally]) -> Tally:
    answered = errors = 0
    for tally in tallies:
        answered += tally.answered
        errors += tally.errors
    return Tally(answered, errors)
