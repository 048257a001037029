"""The version of a state, and how a state of an earlier one becomes one of this build. Pure.

A new kind of rows, or a new member of a record, needs no new version: a build that does not know it leaves it where it
is (rows.py). What an earlier build would misread, or must not act without (a further limit of a key), needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ..errors import NewerState
from .rows import StateContent

VERSION = 1


def same(content: StateContent) -> StateContent:
    """The content as it is."""
    return content


MIGRATIONS: Final[Mapping[int, Callable[[StateContent], StateContent]]] = {0: same}
"""By version: what makes a content of it one of the next version. 0: files from before there were versions."""


def refuse_newer(version: int, where: str) -> None:
    """Raise NewerState for a state that this build cannot know."""
    if version > VERSION:
        raise NewerState(
            f"{where} is of version {version}, from a newer build of the controller; this build has version {VERSION}. "
            "Nothing was changed: this controller does not start, and what runs continues to serve. Start the newer "
            "build again, or move this state away and restore a backup of this build (docs/how-to/upgrade.md)"
        )


def brought_up(
    content: StateContent,
    version: int,
    migrations: Mapping[int, Callable[[StateContent], StateContent]] = MIGRATIONS,
) -> StateContent:
    """The content of that version as one of this build. Raises ValueError for a version that never was."""
    if version != VERSION and version not in migrations:
        raise ValueError(f"there is no version {version}")
    while version in migrations:
        content, version = migrations[version](content), version + 1
    return content
