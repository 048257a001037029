"""Sends pages what they show, as server-sent events. A page that reads slowly gets the latest state, not each one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from aiohttp import web

from ..errors import TooMany
from ..status.live import SentPart, changes
from .event_stream import send_events

MOST = 64
"""Pages at a time."""
PAUSE_S = 0.2
"""Between two looks: an event is seen well within a second, and a busy stack costs five messages a second."""
ALIVE_S = 15.0
"""After this time without a change a comment is sent, which fails where the page has gone."""
_ALIVE = ": nothing has changed\n\n"


class Live:
    """The pages that watch. One look serves all of them."""

    def __init__(self, look: Callable[[], Mapping[str, SentPart]], closing: asyncio.Event) -> None:
        self._look = look
        self._closing = closing
        self._watching = 0
        self._seen: Mapping[str, SentPart] = {}
        self._look_at = 0.0
        """When the next look is due, by the loop's time."""

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """Send one page what it shows, until it goes or the controller ends. Raises TooMany."""
        if self._watching >= MOST:
            raise TooMany(f"{MOST} pages watch this stack already; close one, and repeat")
        self._parts(asyncio.get_running_loop().time())  # what goes wrong here is answered as an error
        self._watching += 1
        try:
            return await send_events(request, self._events(), self._closing)
        finally:
            self._watching -= 1

    def _parts(self, now: float) -> Mapping[str, SentPart]:
        if now >= self._look_at:
            self._seen, self._look_at = self._look(), now + PAUSE_S / 2
        return self._seen

    async def _events(self) -> AsyncGenerator[str, None]:
        sent: Mapping[str, SentPart] = {}
        loop, sent_at = asyncio.get_running_loop(), 0.0
        while True:
            now = self._parts(loop.time())
            text = "".join(changes(sent, now)) or (_ALIVE if loop.time() - sent_at >= ALIVE_S else "")
            if text:
                yield text
                sent_at = loop.time()
            sent = now
            await asyncio.sleep(PAUSE_S)
