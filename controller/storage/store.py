"""Stores what cannot be read back from the engine: scale overrides, rollouts, retirements, failures, events.

Reads come from memory; changes go to `Rows` and from there to the SQLite file (file.py), or where the engine's
managers keep it. While nothing can be written (a full disk, managers without a leader), observed changes are kept in
memory and written later. Changes that an operator asks for are refused.

A damaged state, or one of another version of the controller, is set aside and a new one is started: the running
containers are the truth, and `set_aside` says where the old state is.
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from ..model.desired import Revision
from ..model.reports import Event
from ..model.text import storable
from ..model.world import FailureKey, FailureRecord, GpuFault, Retirement, is_another_try
from .rows import EVENTS_KEPT, RowKind, Rows, StoredEvent

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Override:
    """A scale call: the target, and the number in the compose files then (an edit of that number ends the override)."""

    replicas: int
    spec_replicas: int


def _same(value: V) -> V:
    return value


class StateStore:
    """The state in memory, and the rows that keep it. One owner: the loop's thread."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._overrides: RowKind[str, Override] = RowKind(rows, "override", lambda row: Override(**row), asdict)
        self._retirements: RowKind[str, Retirement] = RowKind(rows, "retirement", lambda row: Retirement(**row), asdict)
        self._failures: RowKind[FailureKey, FailureRecord] = RowKind(
            rows, "failure", lambda row: FailureRecord(**row), asdict
        )
        self._rollouts: RowKind[str, str] = RowKind(rows, "rollout", str, _same)
        self._revisions: RowKind[tuple[str, str], Revision] = RowKind(
            rows, "revision", lambda row: Revision(**row), asdict
        )
        self._autoscaled: RowKind[str, int] = RowKind(rows, "autoscaled", int, _same)
        self._gpu_faults: RowKind[str, GpuFault] = RowKind(rows, "gpu_fault", lambda row: GpuFault(**row), asdict)
        self._restarts: RowKind[str, str] = RowKind(rows, "restart", str, _same)
        self._seen_ready: RowKind[str, float] = RowKind(rows, "seen_ready", float, _same)
        self._keys: RowKind[str, str] = RowKind(rows, "key", str, _same)
        self._last_seq = rows.last_seq
        self._events = {stored.seq: stored for stored in rows.events()}
        self._of_service = Counter(stored.event.service for stored in self._events.values())
        """How many events there are of each service."""

    @property
    def set_aside(self) -> str | None:
        """Where the former state is kept, if it was damaged or of another version; else None."""
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

    def close(self) -> None:
        """Let go of the rows."""
        self._rows.close()

    # ------------------------------------------------------------------------------------------------ scale overrides

    @property
    def overrides(self) -> Mapping[str, Override]:
        """Scale calls in force, by service."""
        return MappingProxyType(self._overrides.values)

    def set_override(self, service: str, override: Override) -> None:
        """Keep a scale call. Raises StoreError."""
        self._overrides.put(service, override, asked=True)

    def drop_override(self, service: str) -> None:
        """End a scale call: the compose files decide again. Raises StoreError."""
        self._overrides.drop(service, asked=True)

    # ------------------------------------------------------------------------------------------------------- restarts

    @property
    def restarts(self) -> Mapping[str, str]:
        """When an operator last restarted a service, as text, by service."""
        return self._restarts.values

    def note_restart(self, service: str, at: str) -> None:
        """Keep a restart, which gives the service another version. Raises StoreError."""
        self._restarts.put(service, at, asked=True)

    def token_of(self, replica: str) -> str:
        """What the admin port of a replica asks for: made of its name and a key that only the state has."""
        key = self._keys.values.get("admin")
        if key is None:
            self._keys.put("admin", key := secrets.token_hex(32))
        return hmac.digest(key.encode(), replica.encode(), "sha256").hex()

    # ---------------------------------------------------------------------------------------------------- autoscaling

    @property
    def autoscaled(self) -> Mapping[str, int]:
        """Targets that the autoscaler decided, by service."""
        return MappingProxyType(self._autoscaled.values)

    def note_autoscaled(self, service: str, replicas: int) -> None:
        """Store a target: the next controller continues from it."""
        if self._autoscaled.values.get(service) != replicas:
            self._autoscaled.put(service, replicas)

    def forget_autoscaled(self, service: str) -> None:
        """Drop the target of a service that is no longer autoscaled."""
        self._autoscaled.drop(service)

    # ---------------------------------------------------------------------------------------------------- retirements

    @property
    def retirements(self) -> Mapping[str, Retirement]:
        """Retiring replicas, by container id. A snapshot: later changes are not in it."""
        return self._retirements.snapshot()

    def retire(self, retirement: Retirement) -> None:
        """Mark a replica as draining; an existing mark keeps its time."""
        if retirement.container_id not in self._retirements.values:
            self._retirements.put(retirement.container_id, replace(retirement, cause=storable(retirement.cause)))

    def stopping(self, container_id: str, now: float) -> None:
        """Record that SIGTERM was sent; the first time counts."""
        retirement = self._retirements.values.get(container_id)
        if retirement is not None and retirement.stopping_since is None:
            self._retirements.put(container_id, replace(retirement, stopping_since=now))

    def forget(self, container_id: str) -> None:
        """Drop the rows of a removed container."""
        self._retirements.drop(container_id)
        self._seen_ready.drop(container_id)

    def containers(self) -> frozenset[str]:
        """Ids of all containers that have rows."""
        return frozenset(self._retirements.values) | frozenset(self._seen_ready.values)

    # ------------------------------------------------------------------------------------------------------- failures

    @property
    def failures(self) -> Mapping[FailureKey, FailureRecord]:
        """Failures in a row, by service and version. A snapshot: later changes are not in it."""
        return self._failures.snapshot()

    def failure(self, key: FailureKey, now: float, detail: str, began_at: float | None = None) -> None:
        """Count a failed start of a version, unless the replica began before the last counted failure."""
        before = self._failures.values.get(key)
        if is_another_try(before, began_at):
            self._failures.put(key, FailureRecord(before.count + 1 if before else 1, now, storable(detail)))

    def clear_failure(self, key: FailureKey) -> None:
        """Drop the failures of a version: it works again, is tried again, or is no longer wanted."""
        self._failures.drop(key)

    # ------------------------------------------------------------------------------------------------------- rollouts

    @property
    def rollouts(self) -> Mapping[str, str]:
        """The rollout state of each service, as JSON."""
        return MappingProxyType(self._rollouts.values)

    def note_rollout(self, service: str, state: str) -> None:
        """Store a service's rollout state. Raises StoreError."""
        if self._rollouts.values.get(service) != state:
            self._rollouts.put(service, storable(state), asked=True)

    def forget_rollout(self, service: str) -> None:
        """Drop the rollout state of a removed service. Raises StoreError."""
        self._rollouts.drop(service, asked=True)

    @property
    def revisions(self) -> Mapping[tuple[str, str], Revision]:
        """The records of versions, by service and version."""
        return MappingProxyType(self._revisions.values)

    def keep_revision(self, revision: Revision) -> None:
        """Store the record of a version, unless there is one. Raises StoreError."""
        if (revision.service, revision.version) not in self._revisions.values:
            self.renew_revision(revision)

    def renew_revision(self, revision: Revision) -> None:
        """Replace the record of a version, after a change that does not make a new version. Raises StoreError."""
        self._revisions.put((revision.service, revision.version), revision, asked=True)

    def drop_revision(self, service: str, version: str) -> None:
        """Drop the record of a version: the service can no longer go back to it. Raises StoreError."""
        self._revisions.drop((service, version), asked=True)

    # ----------------------------------------------------------------------------------------------------- seen ready

    def seen_ready(self, container_id: str, started_at: float) -> bool:
        """Whether the container was ready since that start: if so, an unanswered probe is a failure, also after a
        restart of the controller."""
        return self._seen_ready.values.get(container_id) == started_at

    def note_ready(self, container_id: str, started_at: float) -> None:
        """Store that the container was ready."""
        if not self.seen_ready(container_id, started_at):
            self._seen_ready.put(container_id, started_at)

    # ----------------------------------------------------------------------------------------------------------- GPUs

    @property
    def gpu_faults(self) -> Mapping[str, GpuFault]:
        """Marks on GPUs, by UUID. A snapshot: later changes are not in it."""
        return self._gpu_faults.snapshot()

    def mark_gpu(self, fault: GpuFault) -> None:
        """Store a mark; it replaces an earlier one.

        Raises StoreError for a mark that an operator set and that cannot be written now.
        """
        self._gpu_faults.put(fault.uuid, replace(fault, reason=storable(fault.reason)), asked=fault.kind == "marked")

    def unmark_gpu(self, uuid: str, *, asked: bool = False) -> None:
        """Drop a mark. Raises StoreError if an operator `asked` for it and it cannot be written now."""
        self._gpu_faults.drop(uuid, asked=asked)

    # ---------------------------------------------------------------------------------------------------------- clock

    @property
    def latest_at(self) -> float:
        """The latest time that a deadline counts from; 0 without deadlines."""
        failed = [record.last_at for record in self._failures.values.values()]
        left = [one.stopping_since or one.draining_since for one in self._retirements.values.values()]
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
