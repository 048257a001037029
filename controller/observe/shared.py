"""One question for all who ask it at about the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

FRESH_S = 2.0
"""How long an answer is given to others who ask, such as further pages of the console."""


class SharedAnswers(Generic[T]):
    """`now`: seconds of any clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last: dict[Hashable, tuple[float, asyncio.Future[T]]] = {}
        """By question: when it was asked, and the answer."""

    async def of(self, question: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, at most FRESH_S old. A caller that is cancelled does not cancel it for the others."""
        now = self._now()
        self._last = {key: one for key, one in self._last.items() if 0 <= now - one[0] < FRESH_S}
        if question not in self._last:
            self._last[question] = now, asyncio.ensure_future(ask())
        return await asyncio.shield(self._last[question][1])
