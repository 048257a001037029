"""The models that this process holds, and their report to callers: `pierhead-models` in replies' trailing metadata.

    held by wrappers --> HELD.version, HELD.text --> replies --> parse --> Candidate.models at the callers

A reply carries the text only if `HELD.version` differs from the last one sent on its connection. Without multiplexing
the version stays 0, which costs nothing. On connections without such state, `HELD.text` goes with each reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

MODELS_KEY: Final = "pierhead-models"
"""The metadata key: ids, percent-encoded, separated by commas."""

MAX_TEXT = 4096
"""Characters of an announcement. gRPC accepts 8 KiB of metadata by default, which other keys share."""


class HeldModels:
    """The ids of the models that every multiplexed function of this process holds or loads, and their text."""

    __slots__ = ("_counts", "text", "version")

    def __init__(self) -> None:
        self.version = 0
        """Grows with each change; 0 = nothing here is multiplexed."""
        self.text = ""
        """The text for replies. Beyond MAX_TEXT the ids held longest are left out: calls for them may go elsewhere."""
        self._counts: dict[str, int] = {}

    def begin(self) -> None:
        """Multiplexing is in use: from now on replies report the models, also that there are none yet."""
        if self.version == 0:
            self._changed()

    def add(self, model_id: str) -> None:
        """Count a function that holds or loads the model."""
        self._counts[model_id] = self._counts.get(model_id, 0) + 1
        if self._counts[model_id] == 1:
            self._changed()

    def remove(self, model_id: str) -> None:
        """Count a function that no longer holds the model."""
        self._counts[model_id] -= 1
        if not self._counts[model_id]:
            del self._counts[model_id]
            self._changed()

    def models(self) -> frozenset[str]:
        """The ids of all models."""
        return frozenset(self._counts)

    def _changed(self) -> None:
        # The text before the version: another thread that sees the new version sees its text, or a newer one.
        self.text = announcement(reversed(self._counts))
        self.version += 1


HELD = HeldModels()


def announcement(model_ids: Iterable[str]) -> str:
    """The ids as metadata; the first ones if not all fit."""
    parts: list[str] = []
    left = MAX_TEXT
    for model_id in model_ids:
        part = quote(model_id, safe="")
        left -= len(part) + 1
        if left < -1:  # the last one needs no comma
            break
        parts.append(part)
    return ",".join(parts)


def parse_announcement(text: str | None) -> frozenset[str] | None:
    """The ids in a reply; None = it has no announcement."""
    return None if text is None else frozenset(unquote(part) for part in text.split(",") if part)
