"""Keeps rows in memory, and encodes them as one document that is written from time to time.

What was asked for is written at once, at most every ASKED_S. Observed changes are written with a renewal of the lease,
at most every OBSERVED_S. A killed controller loses the observed changes since the last write; the next one observes
them again.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...errors import StateTooLarge, StoreError
from ...model.reports import Event
from ...storage.rows import EVENTS_KEPT, StateContent, StoredEvent
from ...storage.version import VERSION, brought_up, refuse_newer

ASKED_S = 0.5
OBSERVED_S = 5.0
STORED_LIMIT_S = 10.0
"""How long `stored` waits for a write."""


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """What is to be written, and the number of the last change in it."""

    content: bytes
    change: int


class StateDocument:
    """See `Rows`. The holder of the lease calls `load`, `draft`, `written` and `went`."""

    def __init__(self, limit: int, wake: Callable[[], None]) -> None:
        """`limit`: most bytes of the document. `wake` is called when a write is due at once."""
        self.set_aside: str | None = None
        self.trouble = ""
        self.last_seq = 0
        self._limit = limit
        self._wake = wake
        self._rows: dict[tuple[str, str], str] = {}
        self._events: dict[int, StoredEvent] = {}
        # Changes are numbered. 0 = none.
        self._change = self._asked = self._written = 0
        self._written_at = -math.inf
        self._is_too_large = False
        self._progress = asyncio.Event()
        self._final: bytes | None = None
        """What is written in the place of everything."""

    # ------------------------------------------------------------------------------------------------- for the store

    def read(self, kind: str) -> Iterable[tuple[str, str]]:
        """See `Rows.read`."""
        return [(key, value) for (of, key), value in self._rows.items() if of == kind]

    def put(self, kind: str, key: str, value: str | None, *, asked: bool) -> None:
        """See `Rows.put`. A removal is what makes a state fit again that was too large."""
        if asked and self.trouble and not (self._is_too_large and value is None):
            raise StoreError(self.trouble)
        if value is None:
            self._rows.pop((kind, key), None)
        else:
            self._rows[kind, key] = value
        self._changed(asked=asked)

    def events(self) -> list[StoredEvent]:
        """See `Rows.events`."""
        return list(self._events.values())

    def add_event(self, stored: StoredEvent) -> None:
        """See `Rows.add_event`."""
        self.last_seq = stored.seq
        self._events[stored.seq] = stored
        self._changed()

    def drop_event(self, seq: int) -> None:
        """See `Rows.drop_event`."""
        if self._events.pop(seq, None):
            self._changed()

    def repeat_event(self, seq: int, last_at: float, times: int) -> None:
        """See `Rows.repeat_event`."""
        if stored := self._events.get(seq):
            self._events[seq] = StoredEvent(seq, stored.event, last_at, times)
            self._changed()

    def settle(self) -> None:
        """See `Rows.settle`: the holder of the lease retries by itself."""

    async def stored(self) -> None:
        """See `Rows.stored`."""
        asked = self._asked
        try:
            async with asyncio.timeout(STORED_LIMIT_S):
                while self._written < asked:
                    if self.trouble:
                        raise StoreError(f"{self.trouble}; the change is in force and will be stored when that ends")
                    await self._progress.wait()
        except TimeoutError:
            raise StoreError(f"the change is in force, but was not stored within {STORED_LIMIT_S:g} s") from None

    def content(self) -> StateContent:
        """See `Rows.content`. Memory has everything."""
        rows = tuple((kind, key, value) for (kind, key), value in self._rows.items())
        return StateContent(rows, tuple(self._events.values()), self.last_seq)

    async def replace(self, content: StateContent) -> None:
        """See `Rows.replace`."""
        if self.trouble and not self._is_too_large:
            raise StoreError(self.trouble)
        other = StateDocument(self._limit, lambda: None)
        other._take(content)
        self._final = other._encoded()
        self._changed(asked=True)
        try:
            await self.stored()
        except BaseException as error:
            self._final = None
            self._changed(asked=True)  # it may have been written all the same
            if isinstance(error, StoreError):
                raise StoreError(f"{self.trouble or error}; the former state stays") from error
            raise

    def close(self) -> None:
        """See `Rows.close`."""

    # ------------------------------------------------------------------------------------- for the holder of the lease

    def load(self, content: bytes) -> None:
        """Take what the document says. Raises ValueError if it is damaged, NewerState."""
        try:
            plain = json.loads(gzip.decompress(content))
            version = int(plain["layout"])
            refuse_newer(version, "the state in Swarm's configs")
            rows = tuple((str(kind), str(key), str(value)) for kind, key, value in plain["rows"])
            events = [
                StoredEvent(seq, Event(*event), last_at, times) for seq, last_at, times, *event in plain["events"]
            ]
            # Events that were not written any more have had numbers too, and no number is given twice.
            last_seq = int(plain["last_seq"]) + EVENTS_KEPT
        except (OSError, EOFError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        self._take(brought_up(StateContent(rows, tuple(events), last_seq), version))

    def _take(self, content: StateContent) -> None:
        self._rows = {(kind, key): value for kind, key, value in content.rows}
        self._events = {stored.seq: stored for stored in content.events}
        self.last_seq = content.last_seq

    def due_in_s(self, now: float) -> float:
        """Seconds until a write is due; infinite without changes."""
        if self._change == self._written:
            return math.inf
        pause_s = ASKED_S if self._asked > self._written else OBSERVED_S
        return max(0.0, self._written_at + pause_s - now)

    def draft(self, now: float) -> PendingWrite | None:
        """The document, if a write is due; without the oldest events if they do not fit. Raises StateTooLarge."""
        return None if self.due_in_s(now) > 0 else PendingWrite(self._encoded(), self._change)

    def written(self, draft: PendingWrite, now: float) -> None:
        """The draft is kept."""
        self._written, self._written_at = draft.change, now

    def went(self, trouble: str) -> None:
        """A write, or a renewal of the lease, has ended. `trouble`: why it failed."""
        self.trouble = trouble
        self._progress.set()
        self._progress = asyncio.Event()

    def _changed(self, *, asked: bool = False) -> None:
        self._change += 1
        if asked:
            self._asked = self._change
            self._wake()

    def _encoded(self) -> bytes:
        if self._final is not None:
            return self._final
        while len(content := self._plain()) > self._limit:
            if not self._events:
                self._is_too_large = True
                raise StateTooLarge(
                    f"the state has {len(content)} bytes without events, and Swarm keeps {self._limit}; remove "
                    "services, or shorten their definitions"
                )
            for seq in list(self._events)[: max(1, len(self._events) // 10)]:
                del self._events[seq]
        self._is_too_large = False
        return content

    def _plain(self) -> bytes:
        events = [
            (stored.seq, stored.last_at, stored.times, e.at, e.kind, e.service, e.target, e.message, e.outcome)
            for stored in self._events.values()
            for e in (stored.event,)
        ]
        plain = {"layout": VERSION, "last_seq": self.last_seq, "rows": self.content().rows, "events": events}
        # The fastest level: it makes a tenth of texts like these, in a few milliseconds.
        return gzip.compress(json.dumps(plain, separators=(",", ":")).encode(), compresslevel=1, mtime=0)
