"""Asks replicas for the traces of requests that they keep."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..model.world import ReplicaContainer
from .prober import Prober, Subject
from .shared import SharedAnswers

MOST_AT_ONCE = 16
"""Replicas that are asked at the same time."""

LONGEST_S = 5.0
"""How long all of them are asked; those that have not answered by then are silent."""

AskTraces = Callable[[Subject], Awaitable[Sequence[Any] | None]]
"""Asks a replica; None = it did not say. Does not raise."""


async def no_traces(subject: Subject) -> Sequence[Any] | None:
    """Ask a replica that keeps none."""
    return ()


class KeptByReplica(NamedTuple):
    """The traces of one replica, as it told them: nothing of them is checked."""

    service: str
    replica: str
    traces: Sequence[Any]


class ReplicaTraces:
    """Asks all managed replicas that are up."""

    def __init__(self, prober: Prober, ask: AskTraces) -> None:
        self._prober = prober
        self._ask = ask
        self._shared = SharedAnswers[tuple[list[KeptByReplica], list[str]]](lambda: asyncio.get_running_loop().time())

    async def read(self, replicas: Iterable[ReplicaContainer]) -> tuple[list[KeptByReplica], list[str]]:
        """What they keep, at most FRESH_S old, and the names of those that did not say."""
        return await self._shared.of("all", lambda: self._read(tuple(replicas)))

    async def _read(self, replicas: Iterable[ReplicaContainer]) -> tuple[list[KeptByReplica], list[str]]:
        places = asyncio.Semaphore(MOST_AT_ONCE)
        subjects = self._prober.managed()
        until = asyncio.get_running_loop().time() + LONGEST_S

        async def one(replica: ReplicaContainer, subject: Subject) -> KeptByReplica | str:
            found = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until), places:
                    found = await self._ask(subject)
            return replica.name if found is None else KeptByReplica(replica.service, replica.name, found)

        asked = [one(each, subjects[each.id]) for each in replicas if each.id in subjects]
        told = await asyncio.gather(*asked)
        return [one for one in told if not isinstance(one, str)], [one for one in told if isinstance(one, str)]
