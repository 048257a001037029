"""One replica of a service as this process sees it: where it is, how busy, and whether it may be called."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pierhead.calls.absence import OUT_OF_SIGHT, Absence
from pierhead.calls.outliers import Standing
from pierhead.lanes.connection import Connection
from pierhead.routing_stats import NOTHING, Stats

FULL_TRUSTED_S = 0.05
"""How long a replica counts as full after it refused a call; then it is tried again."""

REFUSAL_TRUSTED_S = 5.0
"""How long a replica that drains or sleeps gets no calls by its own word; then it is tried again: it may be awake."""

CONNECT_S = 3.0
"""How long a connection may take before the replica counts as not reached."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica is and whether it may be called, as a source of replicas reports it."""

    name: str
    address: str
    draining: bool = False
    max_ongoing_requests: int = 0
    """0 = unknown."""
    node: str = ""
    """The machine it runs on; "" = unknown."""
    weight: int = 1
    """Its share of the calls, relative to the other replicas'."""
    stats: Stats | None = None
    """The numbers that it publishes for policies, as the source last read them; None = unknown."""
    out_of_sight: bool = False
    """It takes requests at a socket that this process does not see."""


@dataclass(frozen=True, slots=True)
class ReplicaListing:
    """One source's whole report; the next one replaces it."""

    endpoints: Sequence[Endpoint] = ()
    max_queued_requests: int | None = None
    """How many calls may wait at each handle; -1 = no bound, None = not set."""
    policy: str | None = None
    """The policy of handles that name none; None = not set."""
    policy_kwargs: str = ""
    """The policy's keyword arguments as a JSON object; "" = none."""
    absence: Absence | None = None
    """Why calls do not wait while no replica may be called; None = a replica may come at any time."""


class Replica:
    """One replica. Policies see it as a `policies.Candidate`."""

    __slots__ = (
        "address", "closing", "connection", "full", "inflight", "limit", "listed_draining", "listed_limit", "load",
        "lost_at", "models", "name", "node", "others_until", "out_of_sight", "refuses", "reported_at", "standing",
        "stats", "stats_version", "weight",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint) -> None:
        self.address = endpoint.address
        self.connection: Connection
        self.lost_at = 0.0
        """Since when it has had no connection, while it has none."""
        self.inflight = 0
        self.load = 0
        """Calls in flight there: this process's, plus other callers' by the replica's last report."""
        self.others_until = 0.0
        self.full = False
        """Its last report was a refusal."""
        self.reported_at = 0.0
        self.models: frozenset[str] = frozenset()
        self.stats: Mapping[str, float] = NOTHING
        """Numbers that it publishes, from its replies or the source, whichever is newer. A new object each time."""
        self.stats_version = 0
        self.refuses = False
        """It refused a call because it drains or sleeps; true for a while, or until its connection breaks."""
        self.closing = False
        """No source lists it any more."""
        self.standing = Standing()
        self.listed_limit = sys.maxsize
        self.limit = sys.maxsize
        """Requests it takes at a time: from the source, or learned from its refusals."""
        self.update(endpoint)

    def update(self, endpoint: Endpoint) -> None:
        """Take over a source's report."""
        self.name = endpoint.name
        self.node = endpoint.node
        self.weight = endpoint.weight
        self.out_of_sight = endpoint.out_of_sight
        listed = endpoint.max_ongoing_requests or sys.maxsize
        if listed != self.listed_limit:
            self.limit = self.listed_limit = listed
        self.listed_draining = endpoint.draining
        self.closing = False
        if endpoint.stats is not None:
            self.learn(endpoint.stats)

    def learn(self, stats: Stats) -> None:
        """Take over what it publishes, unless that is not newer."""
        if stats.version > self.stats_version:
            self.stats_version, self.stats = stats

    @property
    def others(self) -> int:
        """Calls of other processes there."""
        return self.load - self.inflight

    def set_others(self, calls: int, until: float) -> None:
        """Take over how many calls of other processes are there; it counts until `until`."""
        self.load = self.inflight + max(0, calls)
        self.others_until = until

    def expire(self, now: float) -> None:
        """Drop the old report of others' calls. After a refusal one call at a time tries the replica."""
        self.set_others(self.limit - self.inflight - 1 if self.full else 0, now + FULL_TRUSTED_S)

    def renewed(self) -> None:
        """Its connection broke: a new process may answer at the address."""
        self.refuses = False
        self.full = False
        self.models = frozenset()
        self.stats_version, self.stats = 0, NOTHING
        self.load = self.inflight
        self.limit = self.listed_limit

    @property
    def drains(self) -> bool:
        """Whether it gets no new calls any more."""
        return self.listed_draining or self.refuses or self.closing

    @property
    def callable(self) -> bool:
        """Whether new calls may go there, regardless of how the last ones ended."""
        return self.connection.ready and not self.drains

    def unreached(self, now: float) -> str:
        """Why no call goes there although the source lists it; "" = calls do."""
        if self.drains:
            return ""
        if not self.connection.ready:
            if now - self.lost_at < CONNECT_S:
                return ""
            return OUT_OF_SIGHT if self.out_of_sight else "no connection"
        return "its calls there fail" if self.standing.until > now else ""

    def describe(self, now: float) -> str:
        """The replica in a few words, for messages."""
        if self.drains:
            return f"{self.name} is draining"
        if not self.connection.ready:
            return f"{self.name} is not connected"
        limit = "" if self.limit == sys.maxsize else f" of {self.limit}"
        works = f"{self.name} works on {self.load}{limit}"
        standing = self.standing
        if standing.in_service:
            return works
        failed = f"its last {standing.failures} calls failed"
        if now < standing.until:
            return f"{works}, is left out for {standing.until - now:.1f} s more ({failed})"
        return f"{works}, is tried by one call at a time ({failed})"
