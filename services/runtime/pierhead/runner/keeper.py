"""Keeps the replicas of one service, in this process or in others: each is replaced by another one when it is ill."""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from pierhead.raised import is_answerable
from pierhead.runner.options import Options, replicas_of
from pierhead.runner.runner import PAUSE_S, ProcessFailed
from pierhead.tasks import end_tasks

logger = logging.getLogger("pierhead")

T = TypeVar("T")


class KeptReplica(Protocol):
    """A replica that was begun."""

    name: str

    async def ready(self) -> None:
        """Return once it serves. Raises why it cannot serve; the replica has then ended."""
        ...

    async def ill(self) -> None:
        """Return once it is unhealthy, or has ended by itself."""
        ...

    async def stop(self, *, at_once: bool) -> None:
        """Drain, or end at once; returns when it has ended."""
        ...


R = TypeVar("R", bound=KeptReplica)


class ReplicaKeeper(ABC, Generic[R]):
    """The replicas of one service."""

    def __init__(self, name: str, words: Options, changed: Callable[[Any], object], tries: int = 1) -> None:
        """`changed`: called with this whenever other replicas are ready; `tries`: how often a first one is tried."""
        self.name = name
        self.words = words
        self.replicas: dict[str, R] = {}
        """Those that are ready, by name."""
        self._changed = changed
        self._tries = tries
        self._alive: set[R] = set()
        self._ending: dict[R, asyncio.Task[None]] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._numbers = itertools.count(1)

    @abstractmethod
    def make(self, name: str) -> R:
        """Begin a replica."""

    async def start(self) -> None:
        """Return once all are ready. Raises why one cannot serve."""
        started = await all_of(self._start_within(self._tries, 0) for _ in range(replicas_of(self.words)))
        self._keeping = [asyncio.create_task(self._keep(each), name=f"keeps {each.name}") for each in started]

    async def stop(self, *, at_once: bool) -> None:
        """End all of them; returns when they have ended."""
        await end_tasks(*self._keeping)
        alive = [each for each in self._alive if at_once or each not in self._ending]
        await asyncio.gather(*(each.stop(at_once=at_once) for each in alive))
        if self._ending:
            await asyncio.wait(self._ending.values())
        self.replicas.clear()  # they are freed now: nothing else refers to them
        self._alive.clear()
        self._keeping.clear()

    async def _start_within(self, tries: float, pause_s: float) -> R:
        """A replica that is ready. Raises why the last one that was tried cannot serve."""
        while True:
            tries -= 1
            try:
                return await self._start()
            except BaseException as error:
                if not tries or not is_answerable(error):
                    raise
                has_said = isinstance(error, ProcessFailed)
                why = error if has_said else f"{self.name}: a replica did not start"
                logger.error("%s; another one is tried in %g s", why, pause_s, exc_info=not has_said)  # noqa: TRY400
            await asyncio.sleep(pause_s)

    async def _start(self) -> R:
        replica = self.make(f"{self.name}-{next(self._numbers)}")
        self._alive.add(replica)
        try:
            await replica.ready()
        except BaseException as error:
            if is_answerable(error):  # else it may still start, and `stop` ends it
                self._alive.discard(replica)
            raise
        self.replicas[replica.name] = replica
        self._changed(self)
        return replica

    async def _keep(self, replica: R) -> None:
        """Replace it by another replica whenever it is unhealthy."""
        while True:
            await replica.ill()
            logger.error("%s is replaced: it is unhealthy, or has ended by itself", replica.name)
            del self.replicas[replica.name]
            self._changed(self)
            self._ending[replica] = asyncio.create_task(self._end(replica), name=f"ends {replica.name}")
            replica = await self._start_within(inf, PAUSE_S)

    async def _end(self, replica: R) -> None:
        await replica.stop(at_once=False)
        self._alive.discard(replica)
        del self._ending[replica]


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return. Raises what the first one raises, once the others were cancelled and have ended."""
    tasks = [asyncio.create_task(each) for each in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)
