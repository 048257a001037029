"""`docker compose down` ends the controller too; the replicas, which Compose does not know, go with it.

Prometheus depends on the controller, so `down` removes Prometheus first. A controller that is told to stop and still
sees its Prometheus is only being restarted: its replicas stay and serve. (HAProxy cannot play that part: Compose makes
the dependents of a container anew when it makes the container anew.) Where there is no Prometheus, HAProxy decides:
`down` stops it at the same time, and as long as it is there, it may be sending requests to the replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from .engines.base import ClusterEngine
from .errors import ControllerError, EngineError, EngineSocketGone
from .model.actions import Action, RemoveContainer, SignalContainer
from .model.world import ReplicaContainer

logger = logging.getLogger(__name__)

DEPENDENT_SERVICE = "prometheus"
EDGE_SERVICE = "haproxy"
HAPROXY_GONE_S = 16.0
"""How long `down` may take to remove HAProxy, which has 10 s to finish what it has."""
LIMIT_S = 40.0
"""Compose gives the controller 60 s for all of it."""
FORCE_S = 10.0
"""Of these, what is kept for removing replicas that did not end by themselves."""
LOOK_S = 0.2
ASK_S = 10.0
CAUSE = "the stack goes down"


async def is_going_down(engine: ClusterEngine, project: str, haproxy_gone_s: float = HAPROXY_GONE_S) -> bool:
    """Whether the stack is being taken down, not just this controller. When nobody can tell: no, which harms nobody."""
    try:
        async with asyncio.timeout(ASK_S):
            if await engine.exists(project, DEPENDENT_SERVICE):
                return False
    except (ControllerError, TimeoutError) as error:
        logger.warning("replicas are left as they are, whether the stack goes down cannot be seen: %s", error)
        return False
    return await _haproxy_goes(engine, project, haproxy_gone_s)


async def _haproxy_goes(engine: ClusterEngine, project: str, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            while await engine.exists(project, EDGE_SERVICE):  # noqa: ASYNC110 - the events have no reader any more
                await asyncio.sleep(LOOK_S)
    except (ControllerError, TimeoutError) as error:
        why = str(error) or f"HAProxy is still there after {limit_s:g} s"
        logger.warning("replicas are left as they are, the stack does not seem to go down: %s", why)
        return False
    return True


async def remove_replicas(engine: ClusterEngine, project: str, limit_s: float = LIMIT_S) -> None:
    """Stop every replica (SIGTERM: they finish what they have) and remove them. Raises EngineSocketGone."""
    deadline = asyncio.get_running_loop().time() + limit_s
    try:
        async with asyncio.timeout_at(deadline - FORCE_S):
            replicas = await _replicas(engine, project)
            logger.info("the stack goes down: stopping %d replicas", len(replicas))
            await _perform_all(engine, project, [_sigterm(replica) for replica in replicas if replica.state.is_up])
            # The engine is asked: its events have no reader any more.
            while any(replica.state.is_up for replica in await _replicas(engine, project)):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        logger.warning("some replicas did not end within %g s, ending them", limit_s - FORCE_S)
    try:
        async with asyncio.timeout_at(deadline):
            await _remove_all(engine, project)
    except TimeoutError:
        logger.error("replicas were left behind: `docker compose down --remove-orphans` removes them")  # noqa: TRY400


async def _remove_all(engine: ClusterEngine, project: str) -> None:
    """Remove until two looks in a row find nothing: a creation may have been under way when the loop was ended."""
    empty_looks = 0
    while empty_looks < 2:
        replicas = await _replicas(engine, project)
        empty_looks = 0 if replicas else empty_looks + 1
        await _perform_all(engine, project, [_removal(replica) for replica in replicas])
        await asyncio.sleep(LOOK_S)


async def _replicas(engine: ClusterEngine, project: str) -> tuple[ReplicaContainer, ...]:
    """Asks until there is an answer: the engine may be slow while all stops, and nobody comes after this controller."""
    while True:
        try:
            return (await engine.observe(project, (), ())).containers
        except EngineSocketGone:
            raise
        except EngineError as error:
            logger.warning("the stack goes down, asking again for its replicas: %s", error)
        await asyncio.sleep(LOOK_S)


async def _perform_all(
    engine: ClusterEngine, project: str, actions: Iterable[SignalContainer | RemoveContainer]
) -> None:
    async def perform(action: SignalContainer | RemoveContainer) -> None:
        try:
            await engine.perform(action, project)
        except ControllerError as error:
            logger.error("%s: %s", _words(action), error)  # noqa: TRY400 - the others still go

    await asyncio.gather(*(perform(action) for action in actions))


def _sigterm(replica: ReplicaContainer) -> SignalContainer:
    return SignalContainer(
        target=replica.name, service=replica.service, container_id=replica.id, signal="SIGTERM", cause=CAUSE
    )


def _removal(replica: ReplicaContainer) -> RemoveContainer:
    return RemoveContainer(
        target=replica.name, service=replica.service, container_id=replica.id, force=True, cause=CAUSE
    )


def _words(action: Action) -> str:
    return f"{type(action).__name__} of {action.target}"
