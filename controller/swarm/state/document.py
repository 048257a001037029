"""A document that several controllers may write: it is replaced only if nothing was written since it was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DocumentHead:
    """What a document's head said when it was read."""

    version: int
    """Grows with every write, also across a removal of the document."""
    content: str
    """The name of the content; "" = there is none yet. Another content has another name."""
    labels: Mapping[str, str]


class RemoteDocument(Protocol):
    """Every call may raise StateUnreachable; a write that raised it may have been carried out, now or later."""

    limit: int
    """Most bytes of a content."""

    async def head(self) -> DocumentHead | None:
        """Read the head; None if there is no document."""
        ...

    async def content(self, head: DocumentHead) -> bytes | None:
        """Read the content that a head names; None if it has been replaced since, or was removed by hand."""
        ...

    async def create(self, labels: Mapping[str, str]) -> None:
        """Create the document without content. Raises StateChanged if there is one."""
        ...

    async def replace(self, head: DocumentHead, labels: Mapping[str, str], content: bytes | None = None) -> None:
        """Replace the labels, and the content if one is given, if nothing was written since `head` was read.

        Raises StateChanged; StateTooLarge above the limit.
        """
        ...

    async def sweep(self, head: DocumentHead) -> None:
        """Remove contents that are older than `head` and not named by it: no write can name them any more."""
        ...

    async def remove(self) -> None:
        """Remove the document and its contents; what was set aside stays."""
        ...

    async def set_aside(self, content: bytes) -> str:
        """Keep a content that cannot be used, for a person to look at; return its name."""
        ...
