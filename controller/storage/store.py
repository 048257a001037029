"""What cannot be read back from the world: scale overrides, rollouts, retirements, failures, events. One small SQLite
file.

Reads come from memory; every change goes to the file before it counts. All calls are synchronous, on the event loop:
in WAL mode a commit is one append to a file without waiting for the disk (0.05 ms), far below what a thread would cost.
A crash of the process loses nothing; a power cut may lose the last changes, never the file's integrity. The one change
that nobody would notice to be lost, a scale target somebody was told is set, does wait for the disk.

While the file cannot be written (a full disk), what has happened is kept in memory and written when it can be. Only
what somebody asks for, and would be told is kept, is refused.

A file that is no intact database is renamed aside and a fresh one begun: the world itself is the truth, and what is
lost is named by `set_aside`. A file of a later controller is not damaged: it is left as it is, and refused.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ..errors import StoreError
from ..model.desired import Revision
from ..model.text import storable
from ..model.told import Event
from ..model.world import FailureKey, FailureRecord, GpuFault, Retirement, is_another_try
from .clock import Anchor

logger = logging.getLogger(__name__)

FILE_NAME = "state.db"
SCHEMA_VERSION = 4
EVENTS_KEPT = 1000
BUSY_MS = 20
"""Longest wait for somebody else who has locked the file."""

SCHEMA = """
CREATE TABLE overrides (service TEXT PRIMARY KEY, replicas INTEGER NOT NULL, spec_replicas INTEGER NOT NULL);
CREATE TABLE retirements (container_id TEXT PRIMARY KEY, replica TEXT NOT NULL, draining_since REAL NOT NULL,
                          stopping_since REAL, cause TEXT NOT NULL, failed INTEGER NOT NULL);
CREATE TABLE failures (service TEXT NOT NULL, version TEXT NOT NULL, count INTEGER NOT NULL, last_at REAL NOT NULL,
                       detail TEXT NOT NULL, PRIMARY KEY (service, version));
CREATE TABLE autoscaled (service TEXT PRIMARY KEY, replicas INTEGER NOT NULL);
CREATE TABLE rollouts (service TEXT PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE revisions (service TEXT NOT NULL, version TEXT NOT NULL, first_at REAL NOT NULL, image TEXT NOT NULL,
                        image_id TEXT NOT NULL, spec TEXT NOT NULL, PRIMARY KEY (service, version));
CREATE TABLE seen_ready (container_id TEXT PRIMARY KEY, started_at REAL NOT NULL);
CREATE TABLE clock (id INTEGER PRIMARY KEY CHECK (id = 1), boot TEXT NOT NULL, wall REAL NOT NULL,
                    monotonic REAL NOT NULL);
CREATE TABLE gpu_faults (uuid TEXT PRIMARY KEY, reason TEXT NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL);
CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, last_at REAL NOT NULL,
                     times INTEGER NOT NULL, kind TEXT NOT NULL, service TEXT NOT NULL, target TEXT NOT NULL,
                     message TEXT NOT NULL, outcome TEXT NOT NULL);
"""

MIGRATIONS = {
    1: "CREATE TABLE autoscaled (service TEXT PRIMARY KEY, replicas INTEGER NOT NULL);",
    # Counts of failures in a row are worth a few seconds of backoff: they begin anew, by version.
    2: """
    DROP TABLE failures;
    CREATE TABLE failures (service TEXT NOT NULL, version TEXT NOT NULL, count INTEGER NOT NULL, last_at REAL NOT NULL,
                           detail TEXT NOT NULL, PRIMARY KEY (service, version));
    CREATE TABLE rollouts (service TEXT PRIMARY KEY, state TEXT NOT NULL);
    CREATE TABLE revisions (service TEXT NOT NULL, version TEXT NOT NULL, first_at REAL NOT NULL, image TEXT NOT NULL,
                            image_id TEXT NOT NULL, spec TEXT NOT NULL, PRIMARY KEY (service, version));
    """,
    3: """
    CREATE TABLE clock (id INTEGER PRIMARY KEY CHECK (id = 1), boot TEXT NOT NULL, wall REAL NOT NULL,
                        monotonic REAL NOT NULL);
    CREATE TABLE gpu_faults (uuid TEXT PRIMARY KEY, reason TEXT NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL);
    """,
}
"""Schema version -> what makes the next one of it."""


@dataclass(frozen=True, slots=True)
class Override:
    """A scale call: the target, and what the compose files said then (when they change, they win again)."""

    replicas: int
    spec_replicas: int


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its place in the list; `times` > 1: it was repeated, last at `last_at`."""

    seq: int
    event: Event
    last_at: float
    times: int = 1


class Store:
    """The state file, and its content in memory. One owner: the loop's thread."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; raises StoreError when the directory cannot be written or the file is of a later
        controller."""
        self._path = directory / FILE_NAME
        self._set_aside: Path | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._db = self._open(clock)
        except (OSError, sqlite3.OperationalError) as error:
            raise StoreError(f"{self._path}: {error}; the controller needs a writable state directory") from error
        self._overrides = {
            service: Override(replicas, was)
            for service, replicas, was in self._db.execute("SELECT service, replicas, spec_replicas FROM overrides")
        }
        self._retirements = {row[0]: _retirement(*row) for row in self._db.execute(_SELECT_RETIREMENTS)}
        self._failures = {
            (service, version): FailureRecord(*rest)
            for service, version, *rest in self._db.execute(
                "SELECT service, version, count, last_at, detail FROM failures"
            )
        }
        self._rollouts: dict[str, str] = dict(self._db.execute("SELECT service, state FROM rollouts"))
        self._revisions = {
            (row[0], row[1]): Revision(*row)
            for row in self._db.execute("SELECT service, version, first_at, image, image_id, spec FROM revisions")
        }
        self._autoscaled: dict[str, int] = dict(self._db.execute("SELECT service, replicas FROM autoscaled"))
        self._gpu_faults = {
            row[0]: GpuFault(*row) for row in self._db.execute("SELECT uuid, reason, at, kind FROM gpu_faults")
        }
        self._last_seq = self._highest_seq()
        self._owed: dict[tuple[object, ...], tuple[str, tuple[object, ...]]] = {}
        self._trouble = ""
        self._seen_ready: dict[str, float] = dict(self._db.execute("SELECT container_id, started_at FROM seen_ready"))

    @property
    def set_aside(self) -> Path | None:
        """Where the former file went when it was damaged; None when it was not."""
        return self._set_aside

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    # ------------------------------------------------------------------------------------------------ scale overrides

    @property
    def overrides(self) -> Mapping[str, Override]:
        """Scale calls in force, by service."""
        return MappingProxyType(self._overrides)

    def set_override(self, service: str, override: Override) -> None:
        """Keep a scale call; on the disk when this returns."""
        values = (service, override.replicas, override.spec_replicas)
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            self._write("INSERT OR REPLACE INTO overrides VALUES (?, ?, ?)", values)
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")
        self._overrides[service] = override

    def drop_override(self, service: str) -> None:
        """Let the compose files decide again."""
        self._write("DELETE FROM overrides WHERE service = ?", (service,))
        self._overrides.pop(service, None)

    # ---------------------------------------------------------------------------------------------------- autoscaling

    @property
    def autoscaled(self) -> Mapping[str, int]:
        """Targets that the autoscaler decided, by service."""
        return MappingProxyType(self._autoscaled)

    def note_autoscaled(self, service: str, replicas: int) -> None:
        """Remember a target: a controller that starts goes on from it."""
        if self._autoscaled.get(service) != replicas:
            self._keep(("autoscaled", service), "INSERT OR REPLACE INTO autoscaled VALUES (?, ?)", (service, replicas))
            self._autoscaled[service] = replicas

    def forget_autoscaled(self, service: str) -> None:
        """The service is not autoscaled any more."""
        if service in self._autoscaled:
            self._keep(("autoscaled", service), "DELETE FROM autoscaled WHERE service = ?", (service,))
            del self._autoscaled[service]

    # ---------------------------------------------------------------------------------------------------- retirements

    @property
    def retirements(self) -> Mapping[str, Retirement]:
        """Replicas on their way out, by container id. A snapshot: later changes do not show in it."""
        return MappingProxyType(dict(self._retirements))

    def retire(self, retirement: Retirement) -> None:
        """Mark a replica as draining; one that already is keeps its time."""
        if retirement.container_id in self._retirements:
            return
        self._put_retirement(retirement)

    def stopping(self, container_id: str, now: float) -> None:
        """Note that SIGTERM was sent; the first time counts."""
        retirement = self._retirements.get(container_id)
        if retirement is not None and retirement.stopping_since is None:
            self._put_retirement(replace(retirement, stopping_since=now))

    def forget(self, container_id: str) -> None:
        """Drop everything known of a container that is gone."""
        if container_id in self._retirements:
            self._keep(("retirements", container_id), "DELETE FROM retirements WHERE container_id = ?", (container_id,))
            del self._retirements[container_id]
        if container_id in self._seen_ready:
            self._keep(("seen_ready", container_id), "DELETE FROM seen_ready WHERE container_id = ?", (container_id,))
            del self._seen_ready[container_id]

    def containers(self) -> frozenset[str]:
        """Ids of all containers the store knows something of."""
        return frozenset(self._retirements) | frozenset(self._seen_ready)

    def _put_retirement(self, retirement: Retirement) -> None:
        values = (
            retirement.container_id,
            retirement.replica,
            retirement.draining_since,
            retirement.stopping_since,
            retirement.cause,
            retirement.failed,
        )
        self._keep(
            ("retirements", retirement.container_id),
            "INSERT OR REPLACE INTO retirements VALUES (?, ?, ?, ?, ?, ?)",
            values,
        )
        self._retirements[retirement.container_id] = retirement

    # ------------------------------------------------------------------------------------------------------- failures

    @property
    def failures(self) -> Mapping[FailureKey, FailureRecord]:
        """Failures in a row, by service and version. A snapshot: later changes do not show in it."""
        return MappingProxyType(dict(self._failures))

    def failure(self, key: FailureKey, now: float, detail: str, began_at: float | None = None) -> None:
        """Count one more failed try of a service's version: not for a replica that began before the last one failed."""
        before = self._failures.get(key)
        if not is_another_try(before, began_at):
            return
        record = FailureRecord(count=before.count + 1 if before else 1, last_at=now, detail=storable(detail))
        values = (*key, record.count, record.last_at, record.detail)
        self._keep(("failures", *key), "INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?, ?)", values)
        self._failures[key] = record

    def clear_failure(self, key: FailureKey) -> None:
        """Forget the failures of a version: it works again, it gets another chance, or nobody wants it any more."""
        if key in self._failures:
            self._keep(("failures", *key), "DELETE FROM failures WHERE service = ? AND version = ?", key)
            del self._failures[key]

    # ------------------------------------------------------------------------------------------------------- rollouts

    @property
    def rollouts(self) -> Mapping[str, str]:
        """Where each service stands between its versions: JSON, by service."""
        return MappingProxyType(self._rollouts)

    def note_rollout(self, service: str, state: str) -> None:
        """Remember where a service stands; it is in the file when this returns."""
        if self._rollouts.get(service) != state:
            self._write("INSERT OR REPLACE INTO rollouts VALUES (?, ?)", (service, state))
            self._rollouts[service] = state

    def forget_rollout(self, service: str) -> None:
        """The service is there no more."""
        if service in self._rollouts:
            self._write("DELETE FROM rollouts WHERE service = ?", (service,))
            del self._rollouts[service]

    @property
    def revisions(self) -> Mapping[tuple[str, str], Revision]:
        """How versions are made, by service and version."""
        return MappingProxyType(self._revisions)

    def keep_revision(self, revision: Revision) -> None:
        """Remember how a version is made; what is known of it already stays."""
        if (revision.service, revision.version) not in self._revisions:
            self.renew_revision(revision)

    def renew_revision(self, revision: Revision) -> None:
        """Remember a version anew: what is not part of it has changed. Raises StoreError."""
        self._write("INSERT OR REPLACE INTO revisions VALUES (?, ?, ?, ?, ?, ?)", astuple(revision))
        self._revisions[(revision.service, revision.version)] = revision

    def drop_revision(self, service: str, version: str) -> None:
        """Nobody will go back to that version."""
        if (service, version) in self._revisions:
            self._write("DELETE FROM revisions WHERE service = ? AND version = ?", (service, version))
            del self._revisions[(service, version)]

    # ----------------------------------------------------------------------------------------------------- seen ready

    def seen_ready(self, container_id: str, started_at: float) -> bool:
        """Whether the container was ready since that start: then silence means failure, also to a new controller."""
        return self._seen_ready.get(container_id) == started_at

    def note_ready(self, container_id: str, started_at: float) -> None:
        """Remember that the container was ready."""
        if not self.seen_ready(container_id, started_at):
            self._keep(
                ("seen_ready", container_id),
                "INSERT OR REPLACE INTO seen_ready VALUES (?, ?)",
                (container_id, started_at),
            )
            self._seen_ready[container_id] = started_at

    # ----------------------------------------------------------------------------------------------------------- GPUs

    @property
    def gpu_faults(self) -> Mapping[str, GpuFault]:
        """Marks on GPUs, by UUID. A snapshot: later changes do not show in it."""
        return MappingProxyType(dict(self._gpu_faults))

    def mark_gpu(self, fault: GpuFault) -> None:
        """Keep a mark; one that was there before is replaced.

        One that somebody asked for is refused while it cannot be kept: it is what they were told. Raises StoreError.
        """
        fault = replace(fault, reason=storable(fault.reason))
        statement = "INSERT OR REPLACE INTO gpu_faults (uuid, reason, at, kind) VALUES (?, ?, ?, ?)"
        self._keep_or_write(("gpu_faults", fault.uuid), statement, astuple(fault), asked=fault.kind == "marked")
        self._gpu_faults[fault.uuid] = fault

    def unmark_gpu(self, uuid: str, *, asked: bool = False) -> None:
        """Drop a mark. Raises StoreError where that cannot be kept and somebody asked for it."""
        if uuid in self._gpu_faults:
            statement = "DELETE FROM gpu_faults WHERE uuid = ?"
            self._keep_or_write(("gpu_faults", uuid), statement, (uuid,), asked=asked)
            del self._gpu_faults[uuid]

    # ---------------------------------------------------------------------------------------------------------- clock

    @property
    def anchor(self) -> Anchor | None:
        """The moment that times in this file count from; None in a new file."""
        row = self._db.execute("SELECT boot, wall, monotonic FROM clock").fetchone()
        return Anchor(*row) if row else None

    def keep_anchor(self, anchor: Anchor) -> None:
        """Let the next controller go on with this one's clock."""
        self._keep(("clock",), "INSERT OR REPLACE INTO clock VALUES (1, ?, ?, ?)", astuple(anchor))

    @property
    def latest_at(self) -> float:
        """The latest time that a deadline counts from; 0 when there is none."""
        failed = [record.last_at for record in self._failures.values()]
        left = [retirement.stopping_since or retirement.draining_since for retirement in self._retirements.values()]
        return max((*failed, *left), default=0.0)

    # --------------------------------------------------------------------------------------------------------- events

    def events(self) -> list[StoredEvent]:
        """The events kept, oldest first."""
        columns = "seq, last_at, times, at, kind, service, target, message, outcome"
        rows = self._db.execute(f"SELECT {columns} FROM events ORDER BY seq").fetchall()  # noqa: S608 - constant
        return [StoredEvent(seq, Event(*event), last_at, times) for seq, last_at, times, *event in rows]

    def append_event(self, event: Event) -> int:
        """Keep an event, drop the oldest above EVENTS_KEPT; return its sequence number (grows, never reused)."""
        self._last_seq += 1
        seq = self._last_seq
        values = (seq, event.at, event.at, 1, event.kind, event.service, event.target, event.message, event.outcome)
        columns = "seq, at, last_at, times, kind, service, target, message, outcome"
        statement = f"INSERT INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - constant
        self._keep(("event", seq), statement, values)
        self._keep(("events",), "DELETE FROM events WHERE seq <= ?", (seq - EVENTS_KEPT,))
        self._owed.pop(("event", seq - EVENTS_KEPT), None)
        self._owed.pop(("again", seq - EVENTS_KEPT), None)
        return seq

    def repeat_event(self, seq: int, last_at: float, times: int) -> None:
        """Count a repetition of a kept event."""
        self._keep(("again", seq), "UPDATE events SET last_at = ?, times = ? WHERE seq = ?", (last_at, times, seq))

    # -------------------------------------------------------------------------------------------------------- the file

    @property
    def trouble(self) -> str:
        """Why the file cannot be written at the moment; "" when it can."""
        return self._trouble

    def settle(self) -> None:
        """Write what could not be written so far, if it can be now."""
        for key, (statement, values) in list(self._owed.items()):
            try:
                self._db.execute(statement, values)
            except sqlite3.Error as error:
                self._trouble = self._refusal(error)
                return
            except Exception:
                # No disk is to blame for this one: tried again it would raise again, in this controller and the next.
                logger.exception("internal: %s is not kept, as it cannot be written", "/".join(map(str, key)))
            del self._owed[key]
        self._trouble = ""

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        """Write something that somebody is told is kept. Raises StoreError."""
        try:
            self._db.execute(statement, _storable(values))
        except sqlite3.Error as error:
            self._trouble = self._refusal(error)
            self._owed.setdefault(("probe",), (_PROBE, ()))  # by this is seen when there is room again
            raise StoreError(self._trouble) from error

    def _keep(self, key: tuple[object, ...], statement: str, values: tuple[object, ...]) -> None:
        """Write something that has happened anyhow: at once, else when there is room. Memory goes on with it.

        What is owed has one statement a key, the last one, so it is bounded as the world is.
        """
        self._owed.pop(key, None)
        self._owed[key] = (statement, _storable(values))
        self.settle()

    def _keep_or_write(
        self, key: tuple[object, ...], statement: str, values: tuple[object, ...], *, asked: bool
    ) -> None:
        """`_write` where somebody asked, `_keep` where it has happened anyhow."""
        if not asked:
            self._keep(key, statement, values)
            return
        self._write(statement, values)
        self._owed.pop(key, None)  # what was owed on the same thing is out of date

    def _refusal(self, error: sqlite3.Error) -> str:
        return f"{self._path}: {error}; look at the disk of the controller's state volume"

    def _highest_seq(self) -> int:
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
        return int(row[0]) if row else 0

    def _open(self, clock: Callable[[], float]) -> sqlite3.Connection:
        try:
            return _connect(self._path)
        except sqlite3.OperationalError:
            raise  # not to be opened or written: another file would fare no better
        except (sqlite3.DatabaseError, UnicodeDecodeError):  # the latter is how Python quotes SQLite on a bad byte
            self._set_aside = self._path.with_name(f"{FILE_NAME}.damaged-{int(clock())}")
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):  # SQLite makes the two side files only when it needs them
                    Path(f"{self._path}{suffix}").rename(f"{self._set_aside}{suffix}")
            return _connect(self._path)


def _connect(path: Path) -> sqlite3.Connection:
    """Open, check and if need be create.

    Raises StoreError for a file of a later controller, sqlite3.DatabaseError for one that is not ours or not intact.
    """
    # Autocommit: each statement is a transaction of its own.
    db = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
    db.text_factory = _text
    try:
        _refuse_later(db, path)
        _prepare(db)
        # From here on a wait would stop all of the controller, and every probe would seem to go unanswered. Whoever
        # locks the file (an editor of databases, a backup) is a disk that cannot be written for a while.
        db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    except BaseException:
        db.close()
        raise
    return db


def _refuse_later(db: sqlite3.Connection, path: Path) -> None:
    """Before anything is written to it."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a later controller (schema version {version}, this one knows up to "
            f"{SCHEMA_VERSION}); nothing was changed, and the replicas go on serving. Start the later controller "
            "again. Or let this one begin anew, without the scale targets, rollouts, earlier versions and marks on "
            "GPUs in that file: move it away with `docker compose run --rm --no-deps --entrypoint sh controller -c "
            f"'cd {path.parent} && mkdir later && mv {path.name}* later'`, then `make up`"
        )


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == 0 and not list(_tables(db)):
        db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        return
    while version in MIGRATIONS:
        db.executescript(f"BEGIN; {MIGRATIONS[version]} PRAGMA user_version = {version + 1}; COMMIT;")
        version += 1
    if version != SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"schema version {version}, this controller knows {SCHEMA_VERSION}")
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(SCHEMA)
        if missing := _columns(fresh) - _columns(db):  # a check of SQLite's own does not see it
            raise sqlite3.DatabaseError(f"its tables lack {', '.join(sorted(missing))}")


def _text(raw: bytes) -> str:
    """A text of the file. SQLite does not see a byte that is none of UTF-8; it costs no more than itself."""
    return raw.decode(errors="backslashreplace")


def _columns(db: sqlite3.Connection) -> set[str]:
    """Every column of every table."""
    asked = "SELECT m.name || '.' || c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'"
    return {name for (name,) in db.execute(asked)}


def _tables(db: sqlite3.Connection) -> Iterator[str]:
    return (name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))


def _storable(values: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(storable(value) if isinstance(value, str) else value for value in values)


_PROBE = "UPDATE sqlite_sequence SET seq = seq WHERE name = 'events'"
_SELECT_RETIREMENTS = "SELECT container_id, replica, draining_since, stopping_since, cause, failed FROM retirements"


def _retirement(
    container_id: str, replica: str, draining_since: float, stopping_since: float | None, cause: str, failed: int
) -> Retirement:
    return Retirement(replica, container_id, draining_since, stopping_since, cause, failed=bool(failed))
