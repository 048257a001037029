"""The SQLite file behind the store: two tables, checked when opened, and the writes that are pending."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from ..errors import StoreError

logger = logging.getLogger(__name__)

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

K = TypeVar("K", str, tuple[str, str])
V = TypeVar("V")


class StateFile:
    """The SQLite file, and the pending writes (`owed`) while it cannot be written."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self._path = directory / FILE_NAME
        self.set_aside: Path | None = None
        self.trouble = ""
        self.owed: dict[tuple[str, ...], tuple[str, tuple[object, ...]]] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.db = self._open(clock)
        except (OSError, sqlite3.OperationalError) as error:
            raise StoreError(f"{self._path}: {error}; the controller needs a writable state directory") from error

    def write(self, key: tuple[str, ...], statement: str, values: tuple[object, ...]) -> None:
        """Write a change that an operator asked for, now or not at all. Raises StoreError."""
        try:
            self.db.execute(statement, values)
        except sqlite3.Error as error:
            self.trouble = self._refusal(error)
            self.owed.setdefault(("probe",), (_PROBE, ()))  # its success shows that the file is writable again
            raise StoreError(self.trouble) from error
        self.owed.pop(key, None)  # a pending write of the same key is outdated

    def keep(self, key: tuple[str, ...], statement: str, values: tuple[object, ...]) -> None:
        """Write an observed change now, or as soon as the file is writable; memory has it at once.

        Only the last statement of each key stays pending, so the number of pending writes is bounded by the keys.
        """
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

    @contextlib.contextmanager
    def waiting_for_the_disk(self) -> Iterator[None]:
        """Writes inside this context are on the disk when they return."""
        self.db.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self.db.execute("PRAGMA synchronous = NORMAL")

    def _refusal(self, error: sqlite3.Error) -> str:
        return f"{self._path}: {error}; look at the disk of the controller's state volume"

    def _open(self, clock: Callable[[], float]) -> sqlite3.Connection:
        try:
            return _connect(self._path)
        except sqlite3.OperationalError:
            raise  # it cannot be opened or written: a new file would fail as well
        except (sqlite3.DatabaseError, UnicodeDecodeError):  # the latter is how Python quotes SQLite on a bad byte
            self.set_aside = self._path.with_name(f"{FILE_NAME}.aside-{int(clock())}")
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):  # SQLite creates the two side files only when needed
                    Path(f"{self._path}{suffix}").rename(f"{self.set_aside}{suffix}")
            return _connect(self._path)


class Kind(Generic[K, V]):
    """All rows of one kind, in memory and in the file. `of` decodes a row's JSON, `plain` encodes a value."""

    def __init__(self, file: StateFile, kind: str, of: Callable[[Any], V], plain: Callable[[V], Any]) -> None:
        self._file = file
        self._kind = kind
        self._plain = plain
        self.values: dict[K, V] = {}
        for key, value in file.db.execute("SELECT key, value FROM state WHERE kind = ?", (kind,)):
            try:
                name: Any = json.loads(key)
                place: Any = name if isinstance(name, str) else tuple(name)
                self.values[place] = of(json.loads(value))
            except (ValueError, TypeError) as error:
                logger.error("%s %s in the state file cannot be read and is left out: %s", kind, key, error)  # noqa: TRY400

    def put(self, key: K, value: V, *, asked: bool = False) -> None:
        """Keep a value. Raises StoreError if it was `asked` for by an operator and cannot be written now."""
        text, values = json.dumps(key), json.dumps(self._plain(value))
        write = self._file.write if asked else self._file.keep
        write((self._kind, text), "INSERT OR REPLACE INTO state VALUES (?, ?, ?)", (self._kind, text, values))
        self.values[key] = value

    def drop(self, key: K, *, asked: bool = False) -> None:
        """Forget a value, if there is one. Raises as `put` does."""
        if key in self.values:
            text = json.dumps(key)
            write = self._file.write if asked else self._file.keep
            write((self._kind, text), "DELETE FROM state WHERE kind = ? AND key = ?", (self._kind, text))
            del self.values[key]

    def snapshot(self) -> Mapping[K, V]:
        """A copy of the values; later changes are not in it."""
        return MappingProxyType(dict(self.values))


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


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    found = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
    if not found and db.execute("PRAGMA user_version").fetchone()[0] == 0:
        db.executescript(f"BEGIN; {'; '.join(TABLES.values())}; COMMIT;")
    elif any(found.get(name) != sql for name, sql in TABLES.items()):
        raise sqlite3.DatabaseError("its tables are not those of this controller")


def _text(raw: bytes) -> str:
    """Decode a text of the file. SQLite does not check UTF-8; an invalid byte is escaped, the rest is kept."""
    return raw.decode(errors="backslashreplace")


_PROBE = "UPDATE sqlite_sequence SET seq = seq WHERE name = 'events'"
