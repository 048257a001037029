"""What the store needs of the place that outlives the controller: the SQLite file, or a document in Swarm's configs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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


class Rows(Protocol):
    """Rows of (kind, key, value), key and value as JSON, and events. No call waits for a network."""

    set_aside: str | None
    """Where the former content is kept, if it was damaged or of another version."""
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

    def close(self) -> None:
        """Let go of the place."""
        ...


class RowKind(Mapping[K, V]):
    """All rows of one kind, in memory and where they are kept. `of` decodes a row's JSON, `plain` encodes a value.

    `asked`: an operator asks for its changes.
    """

    def __init__(
        self, rows: Rows, kind: str, of: Callable[[Any], V], plain: Callable[[V], Any], *, asked: bool = False
    ) -> None:
        self._rows = rows
        self._kind = kind
        self._plain = plain
        self._asked = asked
        self._values: dict[K, V] = {}
        for key, value in rows.read(kind):
            try:
                name: Any = json.loads(key)
                place: Any = name if isinstance(name, str) else tuple(name)
                self._values[place] = of(json.loads(value))
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
            encoded = json.dumps(self._plain(value))
            self._rows.put(self._kind, json.dumps(key), encoded, asked=asked or self._asked)
            self._values[key] = value

    def drop(self, key: K, *, asked: bool = False) -> None:
        """Forget a value, if there is one. Raises as `put` does."""
        if key in self._values:
            self._rows.put(self._kind, json.dumps(key), None, asked=asked or self._asked)
            del self._values[key]

    def snapshot(self) -> Mapping[K, V]:
        """A copy of the values; later changes are not in it."""
        return MappingProxyType(dict(self._values))
