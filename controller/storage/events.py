"""The event log, newest last: kept in the store, served by the API.

An event that repeats is one with a count, and so is the rest of a burst: of more than ONE_BY_ONE events of one kind,
service and outcome within BURST_S, which a large scale makes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ..model.reports import Event, EventOutcome
from ..model.text import storable
from .rows import EVENTS_KEPT, StoredEvent
from .store import StateStore

logger = logging.getLogger(__name__)

LEVELS = {"ok": logging.INFO, "info": logging.INFO, "warning": logging.WARNING, "failed": logging.ERROR}

COALESCE_S = 600.0
"""A repetition within this time only increases the earlier event's count."""
BURST_S = 60.0
ONE_BY_ONE = 20
"""Events of a burst that are stored one by one."""


@dataclass(slots=True)
class _Burst:
    """Events of one kind, service and outcome within BURST_S."""

    began_at: float
    count: int = 0
    rest: int | None = None
    """The number of the event that counts the rest."""


class EventLog:
    """The list of events. Each event, and each repetition, is also one line of the JSON log."""

    def __init__(self, store: StateStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._latest: dict[tuple[str, str, str], int] = {}  # (kind, service, target) -> seq of its newest event
        self._bursts: dict[tuple[str, str, str], _Burst] = {}  # by kind, service and outcome
        self._news = asyncio.Event()

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event; 0 when there is none."""
        return self._store.last_event

    def record(
        self,
        kind: str,
        message: str,
        *,
        service: str = "",
        target: str = "",
        outcome: EventOutcome = "info",
        each: bool = False,
    ) -> None:
        """Keep and log one event; an unchanged repetition increases the earlier event's count. `each`: it is never
        counted with others.
        """
        message = storable(message)
        event = Event(self._clock(), kind, storable(service), storable(target or service), message, outcome)
        fields = {"kind": kind, "service": event.service, "target": event.target, "outcome": outcome}
        logger.log(LEVELS[outcome], message, extra=fields)
        if each or not (self._repeat(event) or self._counts_as_rest(event)):
            self._append(event)
        if outcome == "ok":  # after a success, the next failure is a new event
            self._latest = {
                key: value for key, value in self._latest.items() if key[1:] != (event.service, event.target)
            }

    def select(
        self,
        *,
        since: int | None = None,
        service: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = 100,
    ) -> list[StoredEvent]:
        """Return events, oldest first: the first `limit` after `since`, else the newest `limit`. `service` and `kinds`
        filter them.
        """
        chosen = [
            stored
            for stored in self._store.events()
            if (since is None or stored.seq > since)
            and (service is None or stored.event.service == service)
            and (kinds is None or stored.event.kind in kinds)
        ]
        return chosen[-limit:] if since is None else chosen[:limit]

    async def wait_beyond(self, seq: int) -> None:
        """Return when there is an event newer than `seq`."""
        while self.last_seq <= seq:
            self._news.clear()
            await self._news.wait()

    def _repeat(self, event: Event) -> bool:
        stored = self._store.event(self._latest.get((event.kind, event.service, event.target)))
        if stored is None or event.outcome == "ok" or event.at - stored.last_at > COALESCE_S:
            return False
        if replace(event, at=stored.event.at) != stored.event:
            return False
        self._store.repeat_event(stored.seq, event.at, stored.times + 1)
        return True

    def _counts_as_rest(self, event: Event) -> bool:
        """Count the event in its burst; return whether the event for the rest of the burst stands for it."""
        key = (event.kind, event.service, event.outcome)
        # A burst that began later than now did so before the clock was set back.
        self._bursts = {one: burst for one, burst in self._bursts.items() if 0 <= event.at - burst.began_at <= BURST_S}
        if key not in self._bursts:
            self._bursts[key] = _Burst(event.at)
        burst = self._bursts[key]
        burst.count += 1
        if burst.count <= ONE_BY_ONE:
            return False
        if rest := self._store.event(burst.rest):
            self._store.repeat_event(rest.seq, event.at, rest.times + 1)
        else:
            words = f"more of the same within {BURST_S:g} s, the first of them: {event.message}"
            burst.rest = self._append(replace(event, target=event.service, message=words))
        return True

    def _append(self, event: Event) -> int:
        seq = self._store.append_event(event)
        self._latest[(event.kind, event.service, event.target)] = seq
        if len(self._latest) > 2 * EVENTS_KEPT:  # names of replicas that were removed long ago
            self._latest = {key: value for key, value in self._latest.items() if self._store.event(value)}
        self._news.set()
        return seq
