"""Server-sent events to a page, until they end, the page goes, or the controller ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from aiohttp import web

logger = logging.getLogger(__name__)

WRITE_S = 30.0
"""A page that reads nothing for this long is disconnected."""
GONE_S = 0.2
"""How soon it is seen that the page has gone, or that the controller ends."""
_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def send_events(
    request: web.Request, events: AsyncGenerator[str, None], closing: asyncio.Event
) -> web.StreamResponse:
    """Answer with the text of events. An end of the page is not an error."""
    response = web.StreamResponse(headers=_HEADERS)
    try:
        await response.prepare(request)
    except ConnectionError:
        return response  # the page has gone

    async def send() -> None:
        async with aclosing(events):
            async for text in events:
                async with asyncio.timeout(WRITE_S):
                    await response.write(text.encode())

    sending = asyncio.ensure_future(send())
    try:
        while not (sending.done() or request.transport is None or closing.is_set()):
            await asyncio.wait({sending}, timeout=GONE_S)
    finally:
        sending.cancel()
        (outcome,) = await asyncio.gather(sending, return_exceptions=True)
    if isinstance(outcome, TimeoutError) and request.transport is not None:
        request.transport.abort()  # what waits to be sent would keep the socket
    elif isinstance(outcome, Exception) and not isinstance(outcome, ConnectionError):
        logger.error("events to a page ended through a bug", exc_info=outcome)
    return response
