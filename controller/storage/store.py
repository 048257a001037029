"""Stores what cannot be read back from the engine: scale overrides, rollouts, retirements, failures, events.

Reads come from memory; changes go to `Rows` and from there to the SQLite file (file.py), or where the engine's
managers keep it. While nothing can be written (a full disk, managers without a leader), observed changes are kept in
memory and written later. Changes that an operator asks for are refused.

A damaged state is set aside and a new one is started: the running containers are the truth, and `set_aside` says where
the old state is. One of a newer build is left as it is, and the controller does not start (version.py).
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ..model.desired import Revision
from ..model.keys import ServiceKey
from ..model.reports import Event
from ..model.text import storable
from ..model.world import FailureKey, FailureRecord, GpuFault, Retirement, is_another_try
from .rows import EVENTS_KEPT, RowKind, Rows, StateContent, StoredEvent


@dataclass(frozen=True, slots=True)
class Override:
    """A scale call: the target, and the number in the compose files then (an edit of that number ends the override)."""

    replicas: int
    spec_replicas: int


FORMS: Final[Mapping[str, Any]] = {
    "override": Override,
    "restart": str,
    "autoscaled": int,
    "retirement": Retirement,
    "failure": FailureRecord,
    "rollout": str,
    "revision": Revision,
    "gpu_fault": GpuFault,
    "service_key": ServiceKey,
    "key_use": float,
    "seen_ready": float,
    "sent": int,
    "key": str,
}
"""By kind of rows: the type of their values."""


class StateStore:
    """The state in memory, and the rows that keep it. One owner: the loop's thread."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.is_replaced = False
        """Another state takes the place of this one: the controller that begins next has it, and this one ends."""
        self.overrides: RowKind[str, Override] = RowKind(rows, "override", FORMS["override"], asked=True)
        """Scale calls in force, by service."""
        self.restarts: RowKind[str, str] = RowKind(rows, "restart", FORMS["restart"], asked=True)
        """When an operator last restarted a service, as text, by service: it gives the service another version."""
        self.autoscaled: RowKind[str, int] = RowKind(rows, "autoscaled", FORMS["autoscaled"])
        """Targets that the autoscaler decided, by service: the next controller continues from them."""
        self.retirements: RowKind[str, Retirement] = RowKind(rows, "retirement", FORMS["retirement"])
        """Retiring replicas, by container id."""
        self.failures: RowKind[FailureKey, FailureRecord] = RowKind(rows, "failure", FORMS["failure"])
        """Failures in a row. A version that works again, is tried again, or is no longer wanted has none."""
        self.rollouts: RowKind[str, str] = RowKind(rows, "rollout", FORMS["rollout"], asked=True)
        """The rollout state of each service, as JSON."""
        self.revisions: RowKind[tuple[str, str], Revision] = RowKind(rows, "revision", FORMS["revision"], asked=True)
        """The records of versions, by service and version: a service can go back to those."""
        self.gpu_faults: RowKind[str, GpuFault] = RowKind(rows, "gpu_fault", FORMS["gpu_fault"])
        """Marks on GPUs, by UUID."""
        self.service_keys: RowKind[str, ServiceKey] = RowKind(rows, "service_key", FORMS["service_key"])
        """Keys of clients, by name. A key is revoked at once, also while nothing can be stored."""
        self.key_uses: RowKind[str, float] = RowKind(rows, "key_use", FORMS["key_use"])
        """About when each was last used (unix time)."""
        self.sent: RowKind[str, int] = RowKind(rows, "sent", FORMS["sent"])
        """The number of the last event that a webhook has taken."""
        self._seen_ready: RowKind[str, float] = RowKind(rows, "seen_ready", FORMS["seen_ready"])
        self._keys: RowKind[str, str] = RowKind(rows, "key", FORMS["key"])
        self._last_seq = rows.last_seq
        self._events = {stored.seq: stored for stored in rows.events()}
        self._of_service = Counter(stored.event.service for stored in self._events.values())
        """How many events there are of each service."""

    @property
    def set_aside(self) -> str | None:
        """Where the former state is kept, if it was damaged; else None."""
        return self._rows.set_aside

    @property
    def trouble(self) -> str:
        """Why the state cannot be written at the moment; "" when it can."""
        return self._rows.trouble

    def settle(self) -> None:
        """Retry the pending writes."""
        self._rows.settle()

    async def stored(self) -> None:
        """Return when everything that an operator asked for is kept. Raises StoreError."""
        await self._rows.stored()

    def content(self) -> StateContent:
        """Everything that is kept. Raises StoreError."""
        return self._rows.content()

    async def replace(self, content: StateContent, event: Event) -> None:
        """Keep this in the place of everything, and the event after it. Raises StoreError; nothing has changed then."""
        seq = self._last_seq = max(self._last_seq, content.last_seq) + 1
        events = (*content.events[1 - EVENTS_KEPT :], StoredEvent(seq, event, event.at))
        # Events that this controller still has until it ends get numbers too, and no number is given twice.
        self.is_replaced = True
        try:
            await self._rows.replace(replace(content, events=events, last_seq=seq + EVENTS_KEPT))
        except BaseException:
            self.is_replaced = False
            raise

    def close(self) -> None:
        """Let go of the rows."""
        self._rows.close()

    def token_of(self, replica: str) -> str:
        """What the admin port of a replica asks for: made of its name and a key that only the state has."""
        key = self._keys.get("admin")
        if key is None:
            self._keys.put("admin", key := secrets.token_hex(32))
        return hmac.digest(key.encode(), replica.encode(), "sha256").hex()

    def retire(self, retirement: Retirement) -> None:
        """Mark a replica as draining; an existing mark keeps its time."""
        if retirement.container_id not in self.retirements:
            self.retirements.put(retirement.container_id, replace(retirement, cause=storable(retirement.cause)))

    def stopping(self, container_id: str, now: float) -> None:
        """Record that SIGTERM was sent; the first time counts."""
        retirement = self.retirements.get(container_id)
        if retirement is not None and retirement.stopping_since is None:
            self.retirements.put(container_id, replace(retirement, stopping_since=now))

    def sleeping(self, container_id: str, now: float) -> None:
        """Record that a replica was told to sleep; the first time counts."""
        retirement = self.retirements.get(container_id)
        if retirement is not None and retirement.sleeping_since is None:
            self.retirements.put(container_id, replace(retirement, sleeping_since=now))

    def forget(self, container_id: str) -> None:
        """Drop the rows of a removed container."""
        self.retirements.drop(container_id)
        self._seen_ready.drop(container_id)

    def containers(self) -> frozenset[str]:
        """Ids of all containers that have rows."""
        return frozenset(self.retirements) | frozenset(self._seen_ready)

    def failure(self, key: FailureKey, now: float, detail: str, began_at: float | None = None) -> None:
        """Count a failed start of a version, unless the replica began before the last counted failure."""
        before = self.failures.get(key)
        if is_another_try(before, began_at):
            self.failures.put(key, FailureRecord(before.count + 1 if before else 1, now, storable(detail)))

    def seen_ready(self, container_id: str, started_at: float) -> bool:
        """Whether the container was ready since that start: if so, an unanswered probe is a failure, also after a
        restart of the controller."""
        return self._seen_ready.get(container_id) == started_at

    def note_ready(self, container_id: str, started_at: float) -> None:
        """Store that the container was ready."""
        self._seen_ready.put(container_id, started_at)

    def mark_gpu(self, fault: GpuFault) -> None:
        """Store a mark; it replaces an earlier one.

        Raises StoreError for a mark that an operator set and that cannot be written now.
        """
        self.gpu_faults.put(fault.uuid, replace(fault, reason=storable(fault.reason)), asked=fault.kind == "marked")

    @property
    def latest_at(self) -> float:
        """The latest time that a deadline counts from; 0 without deadlines."""
        failed = [record.last_at for record in self.failures.values()]
        left = [one.stopping_since or one.sleeping_since or one.draining_since for one in self.retirements.values()]
        return max((*failed, *left), default=0.0)

    # --------------------------------------------------------------------------------------------------------- events

    def events(self) -> list[StoredEvent]:
        """The stored events, oldest first."""
        return list(self._events.values())

    def event(self, seq: int | None) -> StoredEvent | None:
        """An event by its number; None where it was dropped."""
        return None if seq is None else self._events.get(seq)

    @property
    def last_event(self) -> int:
        """The number of the newest event; 0 where there is none."""
        return next(reversed(self._events), 0)

    def append_event(self, event: Event) -> int:
        """Store an event; return its sequence number (it grows, is never reused).

        Above EVENTS_KEPT the oldest event of the service that has the most is dropped: no service erases the history of
        the others.
        """
        if len(self._events) >= EVENTS_KEPT:
            self._drop_event()
        self._last_seq += 1
        stored = self._events[self._last_seq] = StoredEvent(self._last_seq, event, event.at)
        self._of_service[event.service] += 1
        self._rows.add_event(stored)
        return self._last_seq

    def repeat_event(self, seq: int, last_at: float, times: int) -> None:
        """Store the repetition of an event."""
        self._events[seq] = replace(self._events[seq], last_at=last_at, times=times)
        self._rows.repeat_event(seq, last_at, times)

    def _drop_event(self) -> None:
        ((most, _),) = self._of_service.most_common(1)
        seq = next(seq for seq, stored in self._events.items() if stored.event.service == most)
        del self._events[seq]
        self._of_service[most] -= 1
        self._rows.drop_event(seq)
