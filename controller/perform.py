"""One action -> one call of the boundary it belongs to, plus the note about it that the world cannot keep."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping

from controller.engines.base import ClusterEngine
from controller.errors import EngineError
from controller.events import EventLog
from controller.model import (
    Action,
    AddServer,
    BeginRetirement,
    CreateContainer,
    DeleteServer,
    GiveUserConfig,
    PullImage,
    RemoveContainer,
    Retirement,
    ServiceSpec,
    SetServerState,
    SetServerWeight,
    SetWaitingRoom,
    ShutdownSessions,
    SignalContainer,
    StartContainer,
    UserConfigReport,
    WriteRouting,
)
from controller.plain_text import one_line
from controller.routing.base import Router
from controller.store import Store

LAST_LINES = 20
LONGEST_GIST = 200
LOG_LIMIT_S = 5.0
"""Longest wait for a failed replica's log: its removal, and so its replacement, waits for it."""

Give = Callable[[str, str], Awaitable[UserConfigReport]]
"""Gives a user_config (its text) to the replica whose admin port is at an address; returns what it says of it. Raises
ReplicaError."""


class Performer:
    """Knows which boundary carries out which action. It never decides whether."""

    def __init__(
        self,
        engine: ClusterEngine,
        router: Router,
        store: Store,
        events: EventLog,
        project: str,
        specs: Callable[[], Mapping[str, ServiceSpec]],
        edge_specs: Callable[[], Mapping[str, ServiceSpec]],
        give: Give,
        given: Callable[[str, UserConfigReport], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._router = router
        self._store = store
        self._events = events
        self._project = project
        self._give = give
        self._given = given
        self._specs = specs
        self._edge_specs = edge_specs
        self._clock = clock

    async def perform(self, action: Action) -> None:
        """Carry out one action; raises ControllerError and its kinds."""
        spec = self._specs().get(action.service)
        match action:
            case RemoveContainer():
                await self._remove(action, spec)
            case SignalContainer():
                await self._engine.perform(action, self._project, spec)
                if action.signal == "SIGTERM":
                    self._store.stopping(action.container_id, self._clock())
            case CreateContainer():
                await self._engine.perform(action, self._project, action.spec or spec)
            case PullImage() | StartContainer():
                await self._engine.perform(action, self._project, spec)
            case (
                AddServer()
                | SetServerState()
                | SetServerWeight()
                | SetWaitingRoom()
                | ShutdownSessions()
                | DeleteServer()
                | WriteRouting()
            ):
                await self._router.perform(action, self._edge_specs().get(action.service, spec))
            case GiveUserConfig():
                self._given(action.container_id, await self._give(action.address, action.text))
            case BeginRetirement():
                self._store.retire(self._retirement(action))
            case _:
                raise TypeError(f"internal: nobody carries out a {type(action).__name__}")

    def _retirement(self, action: BeginRetirement) -> Retirement:
        return Retirement(
            replica=action.target,
            container_id=action.container_id,
            draining_since=self._clock(),
            stopping_since=None,
            cause=action.cause,
            failed=action.failed,
        )

    async def _remove(self, action: RemoveContainer, spec: ServiceSpec | None) -> None:
        # The log goes with the container, so it is read before; the failure counts once, so after.
        log, unread = await self._last_words(action.container_id) if action.failed else ("", "")
        await self._engine.perform(action, self._project, spec)
        if action.failed:
            lines = [line.rstrip() for line in log.splitlines() if line.strip()]
            silence = f"its log cannot be read: {unread}" if unread else "its log is empty"
            last_line = f"; last line of its log: {_gist(lines[-1])}" if lines else f"; {silence}"
            told = f"{action.target}: {action.cause}; its last log lines:" if lines else action.cause
            key = (action.service, action.version)
            self._store.failure(key, self._clock(), action.cause + last_line, action.began_at)
            self._events.record(
                "replica_failed",
                "\n".join([f"{told}; {silence}" if unread else told, *lines]),
                service=action.service,
                target=action.target,
                outcome="failed",
            )
        self._store.forget(action.container_id)

    async def _last_words(self, container_id: str) -> tuple[str, str]:
        """(the end of a container's log, why it cannot be read). Some logging drivers give nothing back."""
        try:
            async with asyncio.timeout(LOG_LIMIT_S):
                return await self._engine.logs(container_id, LAST_LINES), ""
        except EngineError as error:
            return "", one_line(str(error))
        except TimeoutError:
            return "", f"the engine gave nothing of it within {LOG_LIMIT_S:g} s"


def _gist(line: str) -> str:
    """Return what a log line says, on one line and without the frame of a structured log."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    if isinstance(said, dict) and isinstance(said.get("message"), str):
        line = said["message"]
    line = one_line(line)
    return line if len(line) <= LONGEST_GIST else f"{line[:LONGEST_GIST]}..."
