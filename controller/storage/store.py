"""Stores what cannot be read back from the engine: scale overrides, rollouts, retirements, failures, events. It is one
SQLite file.

    state   (kind, key, value as JSON): one row for each value
    events  the events, newest last

Reads come from memory; every change is written to the file before it takes effect. All calls are synchronous, on the
event loop: in WAL mode a commit is one append to a file without waiting for the disk (0.05 ms), far cheaper than a
thread. A crash of the process loses nothing. A power cut may lose the last changes, but never damages the file. Only a
scale target waits for the disk, because its loss would not show after the command has reported success.

While the file cannot be written (a full disk), observed changes are kept in memory and written later. Changes that an
operator asks for are refused.

A damaged file, or a file of another version of the controller, is renamed and a new file is started: the running
containers are the truth, and `set_aside` is the old file's path.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from ..model.desired import Revision
from ..model.reports import Event
from ..model.text import storable
from ..model.world import FailureKey, FailureRecord, GpuFault, Retirement, is_another_try
from .file import Kind, StateFile

logger = logging.getLogger(__name__)

EVENTS_KEPT = 1000

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Override:
    """A scale call: the target, and the number in the compose files then (an edit of that number ends the override)."""

    replicas: int
    spec_replicas: int


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its sequence number; `times` > 1: it was repeated, last at `last_at`."""

    seq: int
    event: Event
    last_at: float
    times: int = 1


def _same(value: V) -> V:
    return value


class Store:
    """The state file, and its content in memory. One owner: the loop's thread."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; raises StoreError when the directory cannot be written."""
        self._file = file = StateFile(directory, clock)
        self._overrides: Kind[str, Override] = Kind(file, "override", lambda row: Override(**row), asdict)
        self._retirements: Kind[str, Retirement] = Kind(file, "retirement", lambda row: Retirement(**row), asdict)
        self._failures: Kind[FailureKey, FailureRecord] = Kind(
            file, "failure", lambda row: FailureRecord(**row), asdict
        )
        self._rollouts: Kind[str, str] = Kind(file, "rollout", str, _same)
        self._revisions: Kind[tuple[str, str], Revision] = Kind(file, "revision", lambda row: Revision(**row), asdict)
        self._autoscaled: Kind[str, int] = Kind(file, "autoscaled", int, _same)
        self._gpu_faults: Kind[str, GpuFault] = Kind(file, "gpu_fault", lambda row: GpuFault(**row), asdict)
        self._seen_ready: Kind[str, float] = Kind(file, "seen_ready", float, _same)
        row = file.db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
        self._last_seq = int(row[0]) if row else 0

    @property
    def set_aside(self) -> Path | None:
        """The new path of the former file, if it was damaged or of another version; else None."""
        return self._file.set_aside

    @property
    def trouble(self) -> str:
        """Why the file cannot be written at the moment; "" when it can."""
        return self._file.trouble

    def settle(self) -> None:
        """Retry the pending writes."""
        self._file.settle()

    def close(self) -> None:
        """Close the file."""
        self._file.db.close()

    # ------------------------------------------------------------------------------------------------ scale overrides

    @property
    def overrides(self) -> Mapping[str, Override]:
        """Scale calls in force, by service."""
        return MappingProxyType(self._overrides.values)

    def set_override(self, service: str, override: Override) -> None:
        """Keep a scale call; on the disk when this returns. Raises StoreError."""
        with self._file.waiting_for_the_disk():
            self._overrides.put(service, override, asked=True)

    def drop_override(self, service: str) -> None:
        """End a scale call: the compose files decide again. Raises StoreError."""
        self._overrides.drop(service, asked=True)

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
        """Store a service's rollout state; it is in the file when this returns. Raises StoreError."""
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
        columns = "seq, last_at, times, at, kind, service, target, message, outcome"
        rows = self._file.db.execute(f"SELECT {columns} FROM events ORDER BY seq").fetchall()  # noqa: S608 - constant
        return [StoredEvent(seq, Event(*event), last_at, times) for seq, last_at, times, *event in rows]

    def append_event(self, event: Event) -> int:
        """Store an event, drop the oldest above EVENTS_KEPT; return its sequence number (it grows, is never reused)."""
        self._last_seq += 1
        seq, oldest = self._last_seq, self._last_seq - EVENTS_KEPT
        values = (seq, event.at, event.at, 1, event.kind, event.service, event.target, event.message, event.outcome)
        columns = "seq, at, last_at, times, kind, service, target, message, outcome"
        statement = f"INSERT INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - constant
        self._file.keep(("event", str(seq)), statement, values)
        self._file.keep(("events",), "DELETE FROM events WHERE seq <= ?", (oldest,))
        self._file.owed.pop(("event", str(oldest)), None)
        self._file.owed.pop(("again", str(oldest)), None)
        return seq

    def repeat_event(self, seq: int, last_at: float, times: int) -> None:
        """Store the repetition of an event."""
        statement = "UPDATE events SET last_at = ?, times = ? WHERE seq = ?"
        self._file.keep(("again", str(seq)), statement, (last_at, times, seq))
