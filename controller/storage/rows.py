"""What the store needs of the place that outlives the controller: the SQLite file, or a document in Swarm's configs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from ..model.reports import Event

logger = logging.getLogger(__name__)

EVENTS_KEPT = 1000

K = TypeVar("K", str, tuple[str, str])
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its sequence number; `times` > 1: it was repeated, last at `last_at`."""

    seq: int
    event: Event
    last_at: float
    times: int = 1


@dataclass(frozen=True, slots=True)
class StateContent:
    """Everything in a state."""

    rows: tuple[tuple[str, str, str], ...] = ()
    """(kind, key, value), of all kinds."""
    events: tuple[StoredEvent, ...] = ()
    """The oldest first."""
    last_seq: int = 0
    """See `Rows.last_seq`."""


class Rows(Protocol):
    """Rows of (kind, key, value), key and value as JSON, and events. No call waits for a network."""

    set_aside: str | None
    """Where the former content is kept, if it was damaged."""
    trouble: str
    """Why nothing can be written at the moment; "" when it can."""

    def read(self, kind: str) -> Iterable[tuple[str, str]]:
        """All (key, value) of a kind."""
        ...

    def put(self, kind: str, key: str, value: str | None, *, asked: bool) -> None:
        """Write a row; None removes it.

        A change that was `asked` for is refused while nothing can be written: raises StoreError. An observed change is
        written as soon as it can be.
        """
        ...

    @property
    def last_seq(self) -> int:
        """The greatest number that an event ever had."""
        ...

    def events(self) -> list[StoredEvent]:
        """The events, oldest first."""
        ...

    def add_event(self, stored: StoredEvent) -> None:
        """Add an event."""
        ...

    def drop_event(self, seq: int) -> None:
        """Drop an event; nothing happens where it is not there."""
        ...

    def repeat_event(self, seq: int, last_at: float, times: int) -> None:
        """Write the repetition of an event."""
        ...

    def settle(self) -> None:
        """Retry what could not be written."""
        ...

    async def stored(self) -> None:
        """Return when everything that was asked for is kept. Raises StoreError."""
        ...

    def content(self) -> StateContent:
        """Everything. Raises StoreError while nothing can be written: something may be missing."""
        ...

    async def replace(self, content: StateContent) -> None:
        """Return when this is kept in the place of everything. From then on nothing else is written.

        It is one step: a kill leaves the former content, or this. Raises StoreError; the former content then stays.
        """
        ...

    def close(self) -> None:
        """Let go of the place."""
        ...


class RowKind(Mapping[K, V]):
    """All rows of one kind, in memory and where they are kept. `form`: the type of a value: a record, or one of JSON's.

    `asked`: an operator asks for its changes.

    Members of a record that this build does not know stay in its row when the value changes: a newer build reads them.
    """

    def __init__(self, rows: Rows, kind: str, form: Callable[..., V], *, asked: bool = False) -> None:
        self._rows = rows
        self._kind = kind
        self._asked = asked
        self._values: dict[K, V] = {}
        self._unknown: dict[K, Mapping[str, Any]] = {}
        for key, value in rows.read(kind):
            try:
                place: Any = place_of(key)
                known, unknown = value_of(form, json.loads(value))
                self._values[place] = known
                if unknown:
                    self._unknown[place] = unknown
            except (ValueError, TypeError) as error:
                logger.error("%s %s in the state file cannot be read and is left out: %s", kind, key, error)  # noqa: TRY400

    def __getitem__(self, key: K) -> V:
        return self._values[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: K, value: V, *, asked: bool = False) -> None:
        """Keep a value. Raises StoreError if it was `asked` for and cannot be written now."""
        if self._values.get(key) != value:
            plain: Any = value
            if is_dataclass(value) and not isinstance(value, type):
                plain = {**self._unknown.get(key, {}), **asdict(value)}
            self._rows.put(self._kind, json.dumps(key), json.dumps(plain), asked=asked or self._asked)
            self._values[key] = value

    def drop(self, key: K, *, asked: bool = False) -> None:
        """Forget a value, if there is one. Raises as `put` does."""
        if key in self._values:
            self._rows.put(self._kind, json.dumps(key), None, asked=asked or self._asked)
            del self._values[key]
            self._unknown.pop(key, None)

    def snapshot(self) -> Mapping[K, V]:
        """A copy of the values; later changes are not in it."""
        return MappingProxyType(dict(self._values))


def place_of(key: str) -> str | tuple[str, ...]:
    """The key of a value from that of its row. Raises ValueError, TypeError."""
    name = json.loads(key)
    return name if isinstance(name, str) else tuple(name)


def value_of(form: Callable[..., V], plain: Any) -> tuple[V, Mapping[str, Any]]:
    """A value from its row's JSON, and the members that its record does not have. Raises ValueError, TypeError."""
    if not is_dataclass(form):
        return form(plain), {}
    if not isinstance(plain, dict):
        raise TypeError(f"expected an object, found {type(plain).__name__}")
    record: Any = form
    names = {field.name for field in fields(record)}
    known = {name: tuple(each) if isinstance(each, list) else each for name, each in plain.items() if name in names}
    return record(**known), {name: each for name, each in plain.items() if name not in names}
