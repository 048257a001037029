"""One action -> one call of the boundary it belongs to, plus the note about it that the world cannot keep."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping

from controller.engines.base import ClusterEngine
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
    ShutdownSessions,
    SignalContainer,
    StartContainer,
    UserConfigReport,
    WriteRouting,
)
from controller.routing.base import Router
from controller.store import Store

LAST_LINES = 20
LONGEST_GIST = 200

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
        log = await self._engine.logs(action.container_id, LAST_LINES) if action.failed else ""
        await self._engine.perform(action, self._project, spec)
        if action.failed:
            lines = [line.rstrip() for line in log.splitlines() if line.strip()]
            last_line = f"; last line of its log: {_gist(lines[-1])}" if lines else "; its log is empty"
            self._store.failure((action.service, action.version), self._clock(), action.cause + last_line)
            self._events.record(
                "replica_failed",
                "\n".join([f"{action.target}: {action.cause}; its last log lines:" if lines else action.cause, *lines]),
                service=action.service,
                target=action.target,
                outcome="failed",
            )
        self._store.forget(action.container_id)


def _gist(line: str) -> str:
    """Return what a log line says, without the frame of a structured log."""
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("message"), str):
        line = said["message"]
    return line if len(line) <= LONGEST_GIST else f"{line[:LONGEST_GIST]}..."
