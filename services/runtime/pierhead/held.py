"""Which models this process holds, and how callers learn of it: `pierhead-models` in the trailing metadata of replies.

    held by wrappers --> HELD.version, HELD.text --> replies --> parse --> Candidate.models at the callers

An answer compares `HELD.version` with the last one sent on its connection, which costs nothing where
nothing is multiplexed: the version then stays 0. On connections that cannot remember, `HELD.text` goes with each reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

MODELS_KEY: Final = "pierhead-models"
"""The metadata key: ids, percent-encoded, separated by commas."""

MAX_TEXT = 4096
"""Characters of an announcement. gRPC takes 8 KiB of metadata by default, and an announcement is not all there is."""


class Held:
    """The ids of the models that every multiplexed function of this process holds or loads, and their text."""

    __slots__ = ("_counts", "text", "version")

    def __init__(self) -> None:
        self.version = 0
        """Grows with each change; 0 = nothing here is multiplexed."""
        self.text = ""
        """What replies carry. Beyond MAX_TEXT the ids held for longest are left out: calls for them lose their way."""
        self._counts: dict[str, int] = {}

    def begin(self) -> None:
        """Something here is multiplexed: replies say so, also that nothing is held yet."""
        if self.version == 0:
            self._changed()

    def add(self, model_id: str) -> None:
        """One more function holds or loads it."""
        self._counts[model_id] = self._counts.get(model_id, 0) + 1
        if self._counts[model_id] == 1:
            self._changed()

    def remove(self, model_id: str) -> None:
        """One function less holds it."""
        self._counts[model_id] -= 1
        if not self._counts[model_id]:
            del self._counts[model_id]
            self._changed()

    def models(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self._counts)

    def _changed(self) -> None:
        # The text before the version: another thread that sees the new version sees its text, or a newer one.
        self.text = announcement(reversed(self._counts))
        self.version += 1


HELD = Held()
"""This process's."""


def announcement(model_ids: Iterable[str]) -> str:
    """The ids as they travel; the first ones where not all have room."""
    parts: list[str] = []
    left = MAX_TEXT
    for model_id in model_ids:
        part = quote(model_id, safe="")
        left -= len(part) + 1
        if left < -1:  # the last one needs no comma
            break
        parts.append(part)
    return ",".join(parts)


def parse_announcement(text: str) -> frozenset[str]:
    """The ids in a reply."""
    return frozenset(unquote(part) for part in text.split(",") if part)
