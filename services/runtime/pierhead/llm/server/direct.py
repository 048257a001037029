"""Writes the events of a stream to the client itself, past the gateway: see pierhead.memory.lending."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pierhead.llm.v1.llm_pb2 import LLMReply

BURST = 64
"""Events that one stream writes before others have a turn, at most."""


class DirectWriter:
    """The replies to one request: those with events go to the client, where the gateway lends its connection."""

    def __init__(self, request: Any, context: Any) -> None:
        self._request = request
        self._context = context
        self._connection: Any = None
        self._events = 0
        self._tokens = 0
        """Of events that were written, and of which the gateway does not know."""
        self._any_tokens = False
        """Whether the gateway knows of a token: it measures the time until the first one."""
        self._second = int(time.monotonic())

    async def with_others(self, reply: LLMReply, *, events: bool) -> LLMReply:
        """A reply that the gateway gets and writes: the first one, after which it is asked for the client's connection
        if the answer is one of events, and every one that is more than events: it ends the lending.
        """
        if not reply.status:
            await self.finish()
        elif events:
            borrow = getattr(self._context, "borrow", None)
            self._connection = borrow() if borrow is not None and self._request.lends else None
            reply.borrows = self._connection is not None
        return self._counted(reply)

    async def write(self, data: bytes, tokens: int) -> LLMReply | None:
        """The reply that the gateway gets: the events themselves where they could not be written, else now and then the
        number of tokens: of the first ones at once, then once a second, for all streams at the same time, as a packet
        costs more than what is in it.
        """
        if self._connection is None:
            return LLMReply(data=data, tokens=tokens)
        self._tokens += tokens
        if not await self._connection.write(data):
            self.close()
            return self._counted(LLMReply(data=data))
        self._events += 1
        if self._events % BURST == 0:
            await asyncio.sleep(0)
        second = int(time.monotonic())
        if second == self._second and (self._any_tokens or not tokens):
            return None
        self._second = second
        return self._counted(LLMReply())

    async def finish(self) -> None:
        """Give the connection back once the client has taken what was written."""
        if self._connection is not None:
            await self._connection.finish()
            self._connection = None

    def close(self) -> None:
        """Give the connection back now."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _counted(self, reply: LLMReply) -> LLMReply:
        reply.tokens += self._tokens
        self._any_tokens |= reply.tokens > 0
        self._tokens = 0
        return reply
