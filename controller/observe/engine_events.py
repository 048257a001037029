"""Follows the engine's event stream. After each event the engine is read again, which wakes the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from ..engines.base import CONNECTED, OUT_OF_MEMORY, ClusterEngine
from ..errors import EngineError, EngineLeaderless, EngineSocketGone, EngineUnreachable
from ..storage.events import EventLog
from .snapshot import Observer

logger = logging.getLogger(__name__)

REOPEN_S = 1.0
"""Pause before a broken event stream is opened again; until then the engine is read each tick."""
LOST_S = 30.0
"""After this time without the engine the controller ends. Traffic continues, and Docker restarts it with the engine."""
SOCKET_GONE_S = 5.0
"""The same where the engine's socket file is deleted: a container that mounts the old file cannot reach the new one.
The controller does not end at once, so that status shows for a while what is wrong."""


@dataclass(eq=False)
class EngineEvents:
    """The engine's events of one project, for as long as the controller runs."""

    _engine: ClusterEngine
    _project: str
    _observer: Observer
    _events: EventLog
    _wake: Callable[[], None]
    _clock: Callable[[], float]
    _lost_s: float = LOST_S

    def __post_init__(self) -> None:
        self._heard_at = self._clock()

    async def follow(self) -> None:
        """Follow the stream, and reopen it when it breaks. Raises EngineUnreachable if the engine stays unreachable."""
        self._heard_at = self._clock()
        while True:
            try:
                await self._read()
            except EngineError as error:
                logger.warning("the engine's event stream broke, opening it again: %s", error)
                if self._observer.stream_open:
                    self._heard_at = self._clock()
                self._give_up_on(error)
            finally:
                self._observer.stream_open = False
            self._wake()
            await asyncio.sleep(REOPEN_S)

    async def _read(self) -> None:
        async for event in self._engine.events(self._project):
            self._heard_at = self._clock()
            self._observer.stream_open = self._observer.stream_open or event == CONNECTED
            if event.kind == OUT_OF_MEMORY:
                self._note_out_of_memory(event.container_id)
            self._observer.engine.changed()

    def _give_up_on(self, error: EngineError) -> None:
        """Raise EngineUnreachable if the engine has been silent for too long. Another controller could do no more while
        there is no leader.
        """
        if isinstance(error, EngineLeaderless):
            self._heard_at = self._clock()
        gone = isinstance(error, EngineSocketGone)
        limit_s = min(SOCKET_GONE_S, self._lost_s) if gone else self._lost_s
        if self._clock() - self._heard_at > limit_s:
            why = "its socket file is deleted" if gone else str(error)
            raise EngineUnreachable(
                f"the Docker Engine has not answered for {limit_s:g} s ({why}); "
                "the controller ends and Docker, when it is back, starts it again"
            ) from error

    def _note_out_of_memory(self, container_id: str) -> None:
        """Record that the kernel killed a process of a replica: the main one, which ends the replica, or another."""
        for one in self._observer.latest.containers:
            if one.id == container_id:
                words = "out of memory: the kernel killed a process in it (raise deploy.resources.limits.memory)"
                self._events.record(
                    "out_of_memory", f"{one.name}: {words}", service=one.service, target=one.name, outcome="warning"
                )
