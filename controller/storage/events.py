"""The event log, newest last: kept in the store, served by the API; repeated events are merged into one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal

from ..model.reports import Event
from ..model.text import storable
from .rows import EVENTS_KEPT, StoredEvent
from .store import Store

logger = logging.getLogger(__name__)

LEVELS = {"ok": logging.INFO, "info": logging.INFO, "warning": logging.WARNING, "failed": logging.ERROR}

COALESCE_S = 600.0
"""A repetition within this time only increases the earlier event's count."""


class EventLog:
    """The list of events. Each event, and each repetition, is also one line of the JSON log."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._events: deque[StoredEvent] = deque(store.events(), maxlen=EVENTS_KEPT)
        self._latest: dict[tuple[str, str, str], int] = {}  # (kind, service, target) -> seq of its newest event
        self._news = asyncio.Event()

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event; 0 when there is none."""
        return self._events[-1].seq if self._events else 0

    def record(
        self,
        kind: str,
        message: str,
        *,
        service: str = "",
        target: str = "",
        outcome: Literal["ok", "failed", "info", "warning"] = "info",
    ) -> None:
        """Keep and log one event; an unchanged repetition increases the earlier event's count."""
        message = storable(message)
        event = Event(self._clock(), kind, storable(service), storable(target or service), message, outcome)
        fields = {"kind": kind, "service": event.service, "target": event.target, "outcome": outcome}
        logger.log(LEVELS[outcome], message, extra=fields)
        if not self._repeat(event):
            self._append(event)

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
            for stored in self._events
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
        seq = self._latest.get((event.kind, event.service, event.target))
        if seq is None or not self._events or seq < self._events[0].seq:
            return False
        index = next(i for i in range(len(self._events) - 1, -1, -1) if self._events[i].seq == seq)
        stored = self._events[index]
        same = replace(event, at=stored.event.at) == stored.event
        if not same or event.outcome == "ok" or event.at - stored.last_at > COALESCE_S:
            return False
        self._events[index] = replace(stored, last_at=event.at, times=stored.times + 1)
        self._store.repeat_event(seq, event.at, stored.times + 1)
        return True

    def _append(self, event: Event) -> None:
        seq = self._store.append_event(event)
        self._events.append(StoredEvent(seq, event, event.at))
        self._latest[(event.kind, event.service, event.target)] = seq
        if event.outcome == "ok":  # after a success, the next failure is a new event
            self._latest = {
                key: value for key, value in self._latest.items() if key[1:] != (event.service, event.target)
            }
        if len(self._latest) > 2 * EVENTS_KEPT:  # names of replicas that were removed long ago
            oldest = self._events[0].seq
            self._latest = {key: value for key, value in self._latest.items() if value >= oldest}
        self._news.set()
