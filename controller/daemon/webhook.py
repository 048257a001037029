"""Sends events that failed or warn to a webhook (PIERHEAD_WEBHOOK), as JSON that Slack and similar chats show.

    {"text": "shop: web: rolled back ...", "project": "shop", "events": [<EventDocument>, ...]}

Each event is sent at least once, also after a restart of the controller: the state has the number of the last one that
the webhook has taken. While the webhook is away, events wait for as long as they are kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from ..errors import WebhookError
from ..status.documents import event_document
from ..status.records.answers import WebhookBody
from ..status.records.document import as_json
from ..storage.events import EventLog
from ..storage.rows import RowKind, StoredEvent

logger = logging.getLogger(__name__)

OUTCOMES: Final = ("failed", "warning")
"""Of the events that are sent: those that `pierhead events` marks."""
MOST_EVENTS = 50
"""In one message."""
MOST_OF_EVENT = 700
"""Characters of an event in the text; Slack shows 40,000 in all."""
GATHERED_S = 2.0
"""What goes wrong rarely comes alone: events of this time share a message."""
AGAIN_S: Final = (5.0, 300.0)
"""Shortest and longest pause before a message is sent again; doubled at each failure."""
WITHIN_S = 10.0
LAST = "webhook"
"""The row of the last event that it has taken."""

Send = Callable[[WebhookBody], Awaitable[None]]
"""Raises WebhookError."""


@dataclass(eq=False)
class Webhook:
    """The messages to one webhook. `_sent`: rows of the state, of numbers of events."""

    _send: Send
    _project: str
    _events: EventLog
    _sent: RowKind[str, int]
    problem: str = ""
    """Why it does not take messages; "" where it does."""

    async def run(self) -> None:
        """Send what happens, for ever. What happened before the first run with a webhook is not sent."""
        if LAST not in self._sent:
            self._sent.put(LAST, self._events.last_seq)
        pause_s, longest_s = AGAIN_S
        while True:
            await self._events.wait_beyond(self._sent[LAST])
            if not self.problem:
                await asyncio.sleep(GATHERED_S)
            try:
                await self._send_next()
            except WebhookError as error:
                if not self.problem:
                    logger.warning("%s; it is tried again", error)
                self.problem = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            else:
                self.problem, pause_s = "", AGAIN_S[0]

    def notices(self) -> tuple[str, ...]:
        """What is wrong with it."""
        return (f"{self.problem}; its messages wait",) if self.problem else ()

    async def _send_next(self) -> None:
        last = self._events.last_seq
        found = [
            one for one in self._events.select(since=self._sent[LAST], limit=last) if one.event.outcome in OUTCOMES
        ]
        if len(found) > MOST_EVENTS:
            last = found[MOST_EVENTS - 1].seq
        if found:
            await self._send(body_of(self._project, found[:MOST_EVENTS]))
        self._sent.put(LAST, last)


def body_of(project: str, events: Sequence[StoredEvent]) -> WebhookBody:
    """The message about some events."""
    text = "\n".join(f"{project}: {one.event.message[:MOST_OF_EVENT]}" for one in events)
    return WebhookBody(_plain(text), project, tuple(map(event_document, events)))


def _plain(text: str) -> str:
    """Text that a chat shows as it is: what a replica says must not become a link, or call people."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class HttpWebhook:
    """POST <url>. Errors name its host alone: the rest of such an address is a secret."""

    def __init__(self, url: str) -> None:
        self._url, self._host = url, urlsplit(url).hostname
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def __call__(self, body: WebhookBody) -> None:
        """Send one message. Raises WebhookError."""
        data, headers = json.dumps(body, default=as_json), {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=WITHIN_S)
        try:
            async with self._session.post(
                self._url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                status = response.status
        except TimeoutError:
            raise WebhookError(f"the webhook at {self._host} does not answer within {WITHIN_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise WebhookError(f"the webhook at {self._host} cannot be reached ({type(error).__name__})") from None
        if not 200 <= status < 300:
            raise WebhookError(f"the webhook at {self._host} answers {status}; check PIERHEAD_WEBHOOK")
