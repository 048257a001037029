"""Makes a backup of the controller's state, and restores one. All of a backup is checked before anything changes."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from ..build import current_build
from ..errors import InvalidRequest, NotYet
from ..model.reports import Event
from ..model.text import one_line
from ..status.documents import event_document
from ..status.records.answers import Backup, StateRow
from ..status.records.changes import Restore, Restored
from ..storage.rows import StateContent, StoredEvent, place_of
from ..storage.store import FORMS, StateStore
from ..storage.version import VERSION, brought_up

if TYPE_CHECKING:
    from pydantic import TypeAdapter

logger = logging.getLogger(__name__)

MOST_COUNTED: Final = 2**53
"""A greater number is not exact in every reader of JSON."""
LATEST_AT: Final = 253_402_300_799.0
"""The end of the year 9999."""


@dataclass(eq=False)
class BackupCommands:
    """`end` ends this controller, so that the next one begins. `wall` is the machine's clock."""

    _store: StateStore
    _project: str
    _end: Callable[[], None]
    _wall: Callable[[], float]

    def made(self) -> Backup:
        """A backup of now. Raises StoreError."""
        return backup_of(self._store.content(), self._project, self._wall())

    def refuse_late_changes(self) -> None:
        """Raise NotYet while another state takes the place of this one: a change would be lost."""
        if self._store.is_replaced:
            raise NotYet(
                "a backup was just restored, and the controller begins again with it; repeat it in a few seconds"
            )

    async def restore(self, wanted: Restore, caller: str) -> Restored:
        """Put a backup in the place of the state, and begin again. Raises InvalidRequest, StoreError."""
        backup, content = wanted.backup, content_of(wanted.backup)
        if backup.project != self._project and not wanted.force:
            raise InvalidRequest(
                f"the backup is of project {backup.project[:80]!r}, and this is {self._project!r}: nothing was "
                "changed; with force (--force) it is restored all the same"
            )
        made_at = datetime.fromtimestamp(backup.at, UTC).isoformat(timespec="seconds")
        said = one_line(f"{caller}: POST restore of the backup of {backup.project[:80]} that was made at {made_at}")
        await self._store.replace(content, Event(self._wall(), "asked", "", "", said))
        logger.info("%s", said)
        self._end()
        return Restored(backup.project, backup.at, len(backup.rows), len(backup.events))


# ------------------------------------------------------------------------------------------------------------ pure


def backup_of(content: StateContent, project: str, at: float) -> Backup:
    """The document of a content."""
    rows = tuple(StateRow(*row) for row in content.rows)
    events = tuple(map(event_document, content.events))
    return Backup(VERSION, project, at, current_build(), content.last_seq, rows, events)


def content_of(backup: Backup) -> StateContent:
    """The content of a document, as one of this build. Raises InvalidRequest for one that cannot be used."""
    rows = tuple((row.kind, row.key, row.value) for row in backup.rows)
    events = tuple(
        StoredEvent(e.seq, Event(e.at, e.kind, e.service, e.target, e.message, e.outcome), e.last_at, e.times)
        for e in backup.events
    )
    if not 0 <= backup.at <= LATEST_AT:
        raise InvalidRequest(f"backup.at: expected a unix time, found {backup.at}")
    try:
        content = brought_up(StateContent(rows, events, backup.last_seq), backup.version)
    except ValueError as error:
        raise InvalidRequest(f"backup.version: {error}") from error
    _refuse_rows(content)
    _refuse_events(content)
    return content


def _refuse_rows(content: StateContent) -> None:
    found: set[tuple[str, str]] = set()
    for number, (kind, key, value) in enumerate(content.rows):
        if (kind, key) in found:
            raise InvalidRequest(f"backup.rows.{number}: {kind[:80]} {key[:80]} is there twice")
        found.add((kind, key))
        try:
            (place_of if kind in FORMS else json.loads)(key)
            _form(kind).validate_python(json.loads(value, parse_float=_finite, parse_constant=_finite))
        except (ValueError, TypeError, RecursionError) as error:
            why = " ".join(str(error).split())[:200]
            raise InvalidRequest(
                f"backup.rows.{number}: {kind[:80]} {key[:80]} is not what this build has there: {why}"
            ) from None


def _refuse_events(content: StateContent) -> None:
    last = 0
    for number, stored in enumerate(content.events):
        if not last < stored.seq <= content.last_seq or not 1 <= stored.times <= MOST_COUNTED:
            raise InvalidRequest(f"backup.events.{number}: expected rising numbers up to last_seq, found {stored.seq}")
        if not (math.isfinite(stored.event.at) and math.isfinite(stored.last_at)):
            raise InvalidRequest(f"backup.events.{number}: expected times, found none")
        last = stored.seq
    if not 0 <= content.last_seq <= MOST_COUNTED:
        raise InvalidRequest(f"backup.last_seq: expected a number up to {MOST_COUNTED}, found {content.last_seq}")


@functools.cache
def _form(kind: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # imported when needed: it takes memory, and few requests ask for it

    return TypeAdapter(FORMS.get(kind, Any))


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number
