"""The items of a stream on their way to its reader."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Final

END: Final = object()

_MOST: Final = 16
"""ItemQueue that wait for their reader."""


class ReaderGone(Exception):
    """Nobody reads the stream any more."""


class ItemQueue:
    """They do not refer to the stream's response, which may be forgotten. Belongs to one event loop."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """What its reader is to get at the end."""
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._places = asyncio.Semaphore(_MOST)
        self._places_for_thread = threading.Semaphore(_MOST)
        self._has_reader = True

    async def get(self) -> Any:
        """The next item, or END."""
        item = await self._items.get()
        self._places.release()
        self._places_for_thread.release()
        return item

    async def put(self, item: Any) -> None:
        """Waits while there are many."""
        await self._places.acquire()
        self._items.put_nowait(item)

    def put_from_thread(self, loop: asyncio.AbstractEventLoop, item: Any) -> None:
        """As `put`, for a reader on `loop`. Raises ReaderGone."""
        self._places_for_thread.acquire()
        if not self._has_reader:
            raise ReaderGone
        loop.call_soon_threadsafe(self._items.put_nowait, item)

    def end(self) -> None:
        """No more items."""
        self._items.put_nowait(END)

    def leave(self) -> None:
        """The reader reads no more."""
        self._has_reader = False
        self._places_for_thread.release()
