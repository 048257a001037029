"""Chat streams of a model, many at a time, and how each of them ended.

A client as strict as can be: it never asks again, and a stream that ends in anything but [DONE] did not end well.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

LONGEST_STREAM_S = 120.0
DONE = "done"
ERROR_EVENT = "error event"
CUT = "cut off"
GIVEN_UP = "given up by the client"


@dataclass(frozen=True)
class Ended:
    """One stream."""

    how: str
    """DONE, ERROR_EVENT (and no [DONE] after it), CUT, GIVEN_UP, or "status 503"."""
    events: int
    """Events with a part of the answer."""
    detail: str = ""
    """What the error said."""


class Streams:
    """Runs streams around a block of a test, in a thread of their own; `ended` is complete when the block has ended.

    Each of `count` users reads one stream; with `again`, one after the other until the block ends.
    """

    def __init__(self, url: str, model: str, *, count: int, tokens: int, again: bool = False) -> None:
        self.ended: list[Ended] = []
        self.begun = 0
        """Streams that have told their first part."""
        self._url = url
        self._body = {"model": model, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        self._count = count
        self._again = again
        self._loop = asyncio.new_event_loop()
        self._users: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._again = False
        if kind is not None:
            self.give_up()
        self._thread.join()
        self._loop.close()

    def give_up(self) -> None:
        """Close every connection, as a client that leaves does."""
        self._loop.call_soon_threadsafe(lambda: [user.cancel() for user in self._users])

    def not_well(self) -> list[Ended]:
        """Those that did not end in [DONE]."""
        return [each for each in self.ended if each.how != DONE]

    def __str__(self) -> str:
        counts = Counter(each.how for each in self.ended)
        lines = [f"{len(self.ended)} streams: " + ", ".join(f"{count} {how}" for how, count in counts.most_common())]
        details = Counter(each.detail for each in self.ended if each.detail)
        return "\n    ".join([*lines, *(f"{count} x {detail}" for detail, count in details.most_common(5))])

    async def _run(self) -> None:
        timeout = ClientTimeout(total=LONGEST_STREAM_S)
        async with ClientSession(connector=TCPConnector(limit=0), timeout=timeout) as session:
            self._users = [asyncio.create_task(self._user(session, number)) for number in range(self._count)]
            await asyncio.gather(*self._users)

    async def _user(self, session: ClientSession, number: int) -> None:
        while True:
            ended = await self._stream(session, number)
            self.ended.append(ended)
            if not self._again or ended.how == GIVEN_UP:
                return
            if ended.how != DONE:
                await asyncio.sleep(0.05)  # what fails at once must not become a busy loop that starves the stack

    async def _stream(self, session: ClientSession, number: int) -> Ended:
        """Read one to its end."""
        told: list[Any] = []
        how, detail = CUT, ""
        body = {**self._body, "messages": [{"role": "user", "content": f"I am user {number}. Say something long."}]}
        try:
            async with session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    return Ended(f"status {answer.status}", 0, (await answer.text())[:300])
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        told.append(_event(line))
                        self.begun += len(told) == 1
            how, detail = _end_of(told)
        except asyncio.CancelledError:
            how = GIVEN_UP
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
        return Ended(how, sum(isinstance(each, dict) and bool(each.get("choices")) for each in told), detail)


def _event(line: bytes) -> Any:
    text = line.removeprefix(b"data: ").strip()
    return "[DONE]" if text == b"[DONE]" else json.loads(text)


def _end_of(told: Sequence[Any]) -> tuple[str, str]:
    """How a stream ended whose connection did so properly."""
    errors = [event["error"] for event in told if isinstance(event, dict) and "error" in event]
    if not errors:
        return (DONE, "") if told and told[-1] == "[DONE]" else (CUT, "it ended without [DONE] and without an error")
    said = str(errors[0]["message"])
    if "error" in told[-1]:
        return ERROR_EVENT, said
    return CUT, f"after its error it continued with {told[-1]!r}: {said}"
