"""Counts the requests that each version of a service has answered since a rollout began, and their errors. Pure.

Each replica counts its answers since its own start. The count that an old replica had when the rollout began is
subtracted, so that both versions are compared over the same time. If too few answers of the former version remain,
its counts from before the rollout are included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..model.observed import Observed
from ..model.world import ReplicaContainer
from .rollout import AnswerTally

ENOUGH = 20
"""With fewer answers of the former version since the rollout began, its answers from before count as well."""


@dataclass(slots=True)
class _AskedReplica:
    version: str
    reports: bool
    """The replica reports its own count. HAProxy's count is then never used: it restarts at 0 with every reload."""
    before: AnswerTally
    """Its count when the rollout began."""
    last: AnswerTally
    gained: AnswerTally = field(default_factory=AnswerTally)
    """Its answers since then. A count that went down was reset (a new worker process, a reload of HAProxy), so it is
    added whole."""

    def note(self, now: AnswerTally) -> None:
        begun_anew = now.answered < self.last.answered or now.errors < self.last.errors
        self.gained += now if begun_anew else now - self.last
        self.last = now


class Answers:
    """Counts the answers of each version during one rollout of a service. Replicas that were removed stay counted."""

    def __init__(self, to: str, begun_at: float) -> None:
        self.to = to
        self.begun_at = begun_at
        self._replicas: dict[str, _AskedReplica] = {}

    def look(self, containers: Iterable[ReplicaContainer], observed: Observed) -> None:
        """Record the replicas' current counts."""
        for container in containers:
            known = self._replicas.get(container.id)
            own = own_count(container)
            now = own if own is not None or (known and known.reports) else edge_count(container, observed)
            if now is None:
                continue  # the replica has just started, no longer answers, or has no count
            if known is None:
                # A replica of an earlier rollout to the same version: its answers were judged in that rollout.
                is_new = container.version == self.to and container.created_at >= self.begun_at
                before = AnswerTally() if is_new else now
                known = _AskedReplica(container.version, own is not None, before, before)
                self._replicas[container.id] = known
            known.note(now)

    def of(self, version: str) -> AnswerTally:
        """Answers of a version since the rollout began; for the former version see ENOUGH."""
        mine = [replica for replica in self._replicas.values() if replica.version == version]
        gained = sum((replica.gained for replica in mine), AnswerTally())
        if version == self.to or gained.answered >= ENOUGH:
            return gained
        return sum((replica.before for replica in mine), gained)

    def versions(self) -> frozenset[str]:
        """The versions with a count."""
        return frozenset(replica.version for replica in self._replicas.values())


def own_count(container: ReplicaContainer) -> AnswerTally | None:
    """The count that a replica reports since its start; None where it reports none."""
    if container.answered is None or container.errors is None:
        return None
    return AnswerTally(container.answered, container.errors)


def edge_count(container: ReplicaContainer, observed: Observed) -> AnswerTally | None:
    """HAProxy's count of a replica's answers; None where HAProxy has no server for it."""
    server = observed.routing.server_of(container.service, container.name) if observed.routing else None
    return AnswerTally(server.answered, server.errors) if server else None
