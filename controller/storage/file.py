"""Keeps rows in one SQLite file with two tables, which are checked when it is opened.

    state   (kind, key, value as JSON): one row for each value
    events  the events, newest last

Every change is written before it takes effect. All calls are synchronous, on the event loop: in WAL mode a commit is
one append to a file without waiting for the disk (0.05 ms), far cheaper than a thread. A crash of the process loses
nothing. A power cut may lose the last changes, but never damages the file. Only a scale target waits for the disk.

A file that cannot be used is renamed; one of a newer build is left as it is. `PRAGMA user_version` has the version.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import Path

from ..errors import StoreError
from ..model.reports import Event
from .rows import StateContent, StoredEvent
from .version import VERSION, brought_up, refuse_newer

FILE_NAME = "state.db"
BUSY_MS = 20
"""Longest wait while another process has locked the file."""

TABLES = {
    "state": "CREATE TABLE state (kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, key))",
    "events": (
        "CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, last_at REAL NOT NULL, "
        "times INTEGER NOT NULL, kind TEXT NOT NULL, service TEXT NOT NULL, target TEXT NOT NULL, "
        "message TEXT NOT NULL, outcome TEXT NOT NULL)"
    ),
}

_PUT = "INSERT OR REPLACE INTO state VALUES (?, ?, ?)"
_DROP = "DELETE FROM state WHERE kind = ? AND key = ?"
_ADD_EVENT = (
    "INSERT INTO events (seq, at, last_at, times, kind, service, target, message, outcome) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_EVENTS = "SELECT seq, last_at, times, at, kind, service, target, message, outcome FROM events ORDER BY seq"
_DURABLE = ("override", "service_key")
"""The kinds whose rows are on the disk when they are put: their loss would not show after the command has reported
success."""


class StateFile:
    """See `Rows`: the SQLite file, and the pending writes (`owed`) while it cannot be written."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file; raises StoreError when the directory cannot be written, NewerState."""
        self._path = directory / FILE_NAME
        self.set_aside: str | None = None
        self.trouble = ""
        self.owed: dict[tuple[str, ...], tuple[str, tuple[object, ...]]] = {}
        self._is_replaced = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.db = self._open(clock)
        except (OSError, sqlite3.OperationalError) as error:
            raise StoreError(f"{self._path}: {error}; the controller needs a writable state directory") from error

    def read(self, kind: str) -> Iterable[tuple[str, str]]:
        """See `Rows.read`."""
        return self.db.execute("SELECT key, value FROM state WHERE kind = ?", (kind,)).fetchall()

    def put(self, kind: str, key: str, value: str | None, *, asked: bool) -> None:
        """See `Rows.put`."""
        write = self._write if asked else self._keep
        statement, values = (_DROP, (kind, key)) if value is None else (_PUT, (kind, key, value))
        if kind in _DURABLE:
            self.db.execute("PRAGMA synchronous = FULL")
        try:
            write((kind, key), statement, values)
        finally:
            if kind in _DURABLE:
                self.db.execute("PRAGMA synchronous = NORMAL")

    @property
    def last_seq(self) -> int:
        """See `Rows.last_seq`."""
        return _last_seq(self.db)

    def events(self) -> list[StoredEvent]:
        """See `Rows.events`."""
        return _events(self.db)

    def add_event(self, stored: StoredEvent) -> None:
        """See `Rows.add_event`."""
        self._keep(("event", str(stored.seq)), _ADD_EVENT, _event_row(stored))

    def drop_event(self, seq: int) -> None:
        """See `Rows.drop_event`. One that was not written yet is never written."""
        self.owed.pop(("again", str(seq)), None)
        if self.owed.pop(("event", str(seq)), None) is None:
            self._keep(("drop", str(seq)), "DELETE FROM events WHERE seq = ?", (seq,))

    def repeat_event(self, seq: int, last_at: float, times: int) -> None:
        """See `Rows.repeat_event`."""
        statement = "UPDATE events SET last_at = ?, times = ? WHERE seq = ?"
        self._keep(("again", str(seq)), statement, (last_at, times, seq))

    async def stored(self) -> None:
        """See `Rows.stored`: `put` has written it already."""

    def content(self) -> StateContent:
        """See `Rows.content`."""
        self.settle()
        if self.trouble:
            raise StoreError(self.trouble)
        return _content(self.db)

    async def replace(self, content: StateContent) -> None:
        """See `Rows.replace`."""
        self.db.execute("PRAGMA synchronous = FULL")
        try:
            _replace(self.db, content)
        except sqlite3.Error as error:
            raise StoreError(self._refusal(error)) from error
        finally:
            self.db.execute("PRAGMA synchronous = NORMAL")
        self._is_replaced = True
        self.owed.clear()

    def close(self) -> None:
        """Close the file."""
        self.db.close()

    def _write(self, key: tuple[str, ...], statement: str, values: tuple[object, ...]) -> None:
        """Write a change that an operator asked for, now or not at all. Raises StoreError."""
        if self._is_replaced:
            raise StoreError("the state was just replaced, and the controller begins again: repeat it in a few seconds")
        try:
            self.db.execute(statement, values)
        except sqlite3.Error as error:
            self.trouble = self._refusal(error)
            self.owed.setdefault(("probe",), (_PROBE, ()))  # its success shows that the file is writable again
            raise StoreError(self.trouble) from error
        self.owed.pop(key, None)  # a pending write of the same key is outdated

    def _keep(self, key: tuple[str, ...], statement: str, values: tuple[object, ...]) -> None:
        """Write an observed change now, or as soon as the file is writable; memory has it at once.

        Only the last statement of each key stays pending, so the number of pending writes is bounded by the keys.
        """
        if self._is_replaced:
            return
        self.owed.pop(key, None)
        self.owed[key] = (statement, values)
        self.settle()

    def settle(self) -> None:
        """Retry the pending writes."""
        for key, (statement, values) in list(self.owed.items()):
            try:
                self.db.execute(statement, values)
            except sqlite3.Error as error:
                self.trouble = self._refusal(error)
                return
            del self.owed[key]
        self.trouble = ""

    def _refusal(self, error: sqlite3.Error) -> str:
        return f"{self._path}: {error}; look at the disk of the controller's state volume"

    def _open(self, clock: Callable[[], float]) -> sqlite3.Connection:
        try:
            _refuse_newer(self._path)
            return _connect(self._path)
        except sqlite3.OperationalError:
            raise  # it cannot be opened or written: a new file would fail as well
        except (sqlite3.DatabaseError, UnicodeDecodeError):  # Unicode: Python decodes SQLite's message on a bad byte
            aside = self._path.with_name(f"{FILE_NAME}.aside-{int(clock())}")
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):  # SQLite creates the two side files only when needed
                    Path(f"{self._path}{suffix}").rename(f"{aside}{suffix}")
            self.set_aside = str(aside)
            return _connect(self._path)


def _connect(path: Path) -> sqlite3.Connection:
    """Open, check and if needed create. Raises sqlite3.DatabaseError for a damaged file or other tables."""
    # Autocommit: each statement is its own transaction.
    db = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
    db.text_factory = _text
    try:
        _prepare(db)
        # From here on a wait would block the whole controller, and every probe would time out. A file that another
        # process locks (a database editor, a backup) counts as not writable for that time.
        db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    except BaseException:
        db.close()
        raise
    return db


def _refuse_newer(path: Path) -> None:
    """Raise NewerState for such a file, before anything is written to it: a connection that may write tidies it up."""
    if path.exists():
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            refuse_newer(_version(db), str(path))


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    found = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
    version = _version(db)
    if not found and version == 0:
        db.executescript(f"BEGIN; {'; '.join(TABLES.values())}; PRAGMA user_version = {VERSION}; COMMIT;")
    elif any(found.get(name) != sql for name, sql in TABLES.items()):
        raise sqlite3.DatabaseError("its tables are not those of this controller")
    elif version != VERSION:
        try:
            content = brought_up(_content(db), version)
        except ValueError as error:
            raise sqlite3.DatabaseError(str(error)) from error
        _replace(db, content)


def _content(db: sqlite3.Connection) -> StateContent:
    rows = db.execute("SELECT kind, key, value FROM state").fetchall()
    return StateContent(tuple(rows), tuple(_events(db)), _last_seq(db))


def _replace(db: sqlite3.Connection, content: StateContent) -> None:
    """Put this in the place of everything, in one step."""
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute("DELETE FROM state")
        db.execute("DELETE FROM events")
        db.executemany(_PUT, content.rows)
        db.executemany(_ADD_EVENT, map(_event_row, content.events))
        db.execute("DELETE FROM sqlite_sequence")  # what SQLite has counted itself
        db.execute("INSERT INTO sqlite_sequence VALUES ('events', ?)", (content.last_seq,))
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite has ended it by itself after some errors
            db.execute("ROLLBACK")
        raise


def _last_seq(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return int(row[0]) if row else 0


def _events(db: sqlite3.Connection) -> list[StoredEvent]:
    rows = db.execute(_EVENTS).fetchall()
    return [StoredEvent(seq, Event(*event), last_at, times) for seq, last_at, times, *event in rows]


def _event_row(stored: StoredEvent) -> tuple[object, ...]:
    at, *words = astuple(stored.event)
    return (stored.seq, at, stored.last_at, stored.times, *words)


def _text(raw: bytes) -> str:
    """Decode a text of the file. SQLite does not check UTF-8; an invalid byte is escaped, the rest is kept."""
    return raw.decode(errors="backslashreplace")


_PROBE = "UPDATE sqlite_sequence SET seq = seq WHERE name = 'events'"
