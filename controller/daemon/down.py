"""Removes the replicas at `docker compose down`, as Compose does not know them.

Prometheus depends on the controller, so `down` removes Prometheus first. A controller that gets SIGTERM while
Prometheus is there is only being restarted: its replicas stay and serve. (HAProxy cannot depend on the controller:
with a container Compose creates its dependents again.) Without Prometheus HAProxy decides: `down` stops
it together with the controller, and while it is there it may be sending requests to the replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from ..engines.base import ClusterEngine
from ..errors import ControllerError, EngineError, EngineSocketGone
from ..files.parse import EDGE_SERVICE
from ..model.actions import RemoveContainer, SignalContainer
from ..model.world import ReplicaContainer

logger = logging.getLogger(__name__)

DEPENDENT_SERVICE = "prometheus"
HAPROXY_GONE_S = 16.0
"""How long `down` may take to remove HAProxy, which has 10 s to finish its requests."""
LIMIT_S = 40.0
"""For all of it; Compose kills the controller after 60 s."""
FORCE_S = 10.0
"""The part of LIMIT_S that is reserved for replicas that do not end by themselves."""
LOOK_S = 0.2
ASK_S = 10.0


async def is_going_down(engine: ClusterEngine, project: str, haproxy_gone_s: float = HAPROXY_GONE_S) -> bool:
    """Whether the whole stack is being taken down. False if the engine does not answer: replicas stay then."""
    try:
        async with asyncio.timeout(ASK_S):
            if await engine.exists(project, DEPENDENT_SERVICE):
                return False
    except (ControllerError, TimeoutError) as error:
        logger.warning("replicas are not removed, because the engine does not answer: %s", error)
        return False
    return await _haproxy_goes(engine, project, haproxy_gone_s)


async def _haproxy_goes(engine: ClusterEngine, project: str, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            while await engine.exists(project, EDGE_SERVICE):  # noqa: ASYNC110 - nothing reads the engine's events now
                await asyncio.sleep(LOOK_S)
    except (ControllerError, TimeoutError) as error:
        why = str(error) or f"HAProxy is still there after {limit_s:g} s"
        logger.warning("replicas are not removed, because the stack does not seem to go down: %s", why)
        return False
    return True


async def remove_replicas(engine: ClusterEngine, project: str, limit_s: float = LIMIT_S) -> None:
    """Stop every replica with SIGTERM, so that it finishes its requests, and remove it. Raises EngineSocketGone."""
    deadline = asyncio.get_running_loop().time() + limit_s
    try:
        async with asyncio.timeout_at(deadline - FORCE_S):
            replicas = await _replicas(engine, project)
            logger.info("the stack goes down: stopping %d replicas", len(replicas))
            await _perform_all(engine, project, [_sigterm(replica) for replica in replicas if replica.state.is_up])
            while any(replica.state.is_up for replica in await _replicas(engine, project)):  # noqa: ASYNC110 - as above
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        logger.warning("some replicas did not end within %g s and are killed", limit_s - FORCE_S)
    try:
        async with asyncio.timeout_at(deadline):
            await _remove_all(engine, project)
    except TimeoutError:
        logger.error("replicas were left behind: `docker compose down --remove-orphans` removes them")  # noqa: TRY400


async def _remove_all(engine: ClusterEngine, project: str) -> None:
    """Remove until two looks in a row find nothing: a creation may have been in progress when the loop ended."""
    empty_looks = 0
    while empty_looks < 2:
        replicas = await _replicas(engine, project)
        empty_looks = 0 if replicas else empty_looks + 1
        await _perform_all(engine, project, [_removal(replica) for replica in replicas])
        await asyncio.sleep(LOOK_S)


async def _replicas(engine: ClusterEngine, project: str) -> tuple[ReplicaContainer, ...]:
    """Retry until the engine answers: it may be slow while everything stops, and no later controller cleans up."""
    while True:
        try:
            return (await engine.observe(project, (), ())).containers
        except EngineSocketGone:
            raise
        except EngineError as error:
            logger.warning("the engine is asked again for the replicas to remove: %s", error)
        await asyncio.sleep(LOOK_S)


async def _perform_all(
    engine: ClusterEngine, project: str, actions: Iterable[SignalContainer | RemoveContainer]
) -> None:
    async def perform(action: SignalContainer | RemoveContainer) -> None:
        try:
            await engine.perform(action, project)
        except ControllerError as error:
            logger.error("%s: %s", action.words, error)  # noqa: TRY400 - the other replicas are still removed

    await asyncio.gather(*(perform(action) for action in actions))


def _sigterm(replica: ReplicaContainer) -> SignalContainer:
    return SignalContainer(target=replica.name, service=replica.service, container_id=replica.id, signal="SIGTERM")


def _removal(replica: ReplicaContainer) -> RemoveContainer:
    return RemoveContainer(target=replica.name, service=replica.service, container_id=replica.id, force=True)
