"""A text in a document: on Swarm the resolved compose files, for the controller of every manager."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping
from types import MappingProxyType

from ...errors import StateChanged, StateUnreachable
from .configs import SwarmDocument

TRIES = 5
AGAIN_S = 0.1


class KeptText:
    """Written by commands, read by the controller; the last one counts."""

    def __init__(self, document: SwarmDocument) -> None:
        self._document = document

    async def edition(self) -> str:
        """A name that changes with the text; "" = there is no text. Raises StateUnreachable."""
        head = await self._document.head()
        return head.content if head else ""

    async def read(self) -> str | None:
        """The text; None if there is none. Raises StateUnreachable; ValueError for a damaged one."""
        for _ in range(TRIES):
            head = await self._document.head()
            if head is None or not head.content:
                return None
            content = await self._document.content(head)
            if content is not None:
                try:
                    return gzip.decompress(content).decode()
                except (OSError, EOFError) as error:
                    raise ValueError(f"config {head.content}: {error}") from error
            await asyncio.sleep(AGAIN_S)  # it was replaced between the two calls
        raise StateUnreachable("the text was removed from Swarm's configs, or changes all the time")

    async def write(self, text: str, labels: Mapping[str, str] = MappingProxyType({})) -> None:
        """Replace the text, and these labels of its document. Raises StateTooLarge, StateUnreachable."""
        content = gzip.compress(text.encode(), mtime=0)
        for tried in range(1, TRIES + 1):
            try:
                head = await self._document.head()
                if head is None:
                    await self._document.create({})
                else:
                    await self._document.replace(head, {**head.labels, **labels}, content)
                    await self._document.sweep(head)
                    return
            except StateChanged:
                if tried == TRIES:
                    raise
            await asyncio.sleep(AGAIN_S * (tried - 1))
        raise StateUnreachable("the text could not be written")
