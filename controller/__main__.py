"""The controller's daemon: `python -m controller`. It connects to the Docker Engine, HAProxy and the state."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aiohttp import web
from docker import APIClient

from . import log
from .api import Gatekeeper
from .assembly import Controller, World, assemble
from .desired.measurements import Prometheus
from .down import is_going_down, remove_replicas
from .engines.base import ClusterEngine
from .engines.docker import HTTP_TIMEOUT_S, DockerEngine, open_client
from .engines.gpu_discovery import GpuSources
from .engines.swarm import SwarmEngine
from .errors import ControllerError, EngineSocketGone, EngineUnreachable, SettingsError
from .lease import state_lease, state_lock
from .observe.probe import HttpProbe
from .routing.haproxy import HAProxyRouter
from .settings import Settings
from .spec.compose import ComposeProject
from .spec.kept import KeptProject
from .spec.watch import SpecSource
from .status.discovery import DiscoveryServer
from .storage.clock import SteadyClock
from .storage.file import StateFile
from .storage.holder import Holder
from .storage.store import Store
from .storage.swarm import SwarmConfigs, compose_files_of, state_of
from .storage.text import KeptText

logger = logging.getLogger("controller")

ENGINE_RETRY_S = 2.0
THREADS = 32
STATE_TIMEOUT_S = 5
"""Longest wait for an answer about the state in Swarm: the lease does not hold longer without a renewal."""


class _Stopped(Exception):
    """Not an error: raised at SIGTERM to end all tasks of the TaskGroup."""


async def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT; then leave the replicas (a restart) or remove them (the stack goes down)."""
    stop = asyncio.Event()
    _give_threads(asyncio.get_running_loop())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with _state(settings, stop) as state:
        engine = await _engine(settings, stop) if state is not None else None
        if state is not None and engine is not None:
            await _control(settings, engine, state, stop)
    logger.info("stopped")


@dataclass(frozen=True, slots=True)
class _State:
    """The project's state and compose files, and the right to act on them."""

    store: Store
    source: SpecSource
    clock: Callable[[], float]
    acts: Callable[[], bool] = lambda: True


@contextlib.asynccontextmanager
async def _state(settings: Settings, stop: asyncio.Event) -> AsyncIterator[_State | None]:
    """Have the state alone; None if `stop` is set before. Raises AnotherController, StoreError."""
    if settings.on_swarm:
        async with _state_in_swarm(settings.project, stop) as state:
            yield state
        return
    async with state_lock(settings.state_dir, settings.project):
        with contextlib.closing(Store(StateFile(settings.state_dir))) as store:
            yield _State(store, ComposeProject.from_environment(os.environ), SteadyClock(store.latest_at))


@contextlib.asynccontextmanager
async def _state_in_swarm(project: str, stop: asyncio.Event) -> AsyncIterator[_State | None]:
    client = await _client(stop, STATE_TIMEOUT_S)
    if client is None:
        yield None
        return
    configs = SwarmConfigs(client)
    holder = Holder(state_of(configs, project))
    try:
        if not await holder.take(stop):
            yield None
            return
        async with state_lease(holder):
            source = KeptProject(project, KeptText(compose_files_of(configs, project)))
            yield _State(Store(holder.rows), source, holder.controller_clock, holder.acts)
    finally:
        configs.close()
        client.close()


async def _control(settings: Settings, engine: ClusterEngine, state: _State, stop: asyncio.Event) -> None:
    """Control the project until `stop` is set."""
    router, probe, prometheus = HAProxyRouter(settings.haproxy_run, settings.edge), HttpProbe(), Prometheus()
    world = World(
        settings.project,
        engine,
        router,
        state.source,
        state.store,
        probe,
        prometheus,
        probe.give,
        is_manual=settings.is_manual,
        policy_dir=settings.project_dir,
        router_silence_s=settings.haproxy_silence_s,
        acts=state.acts,
    )
    try:
        await _serve(settings, world, state.clock, stop)
        if await is_going_down(engine, settings.project):
            await remove_replicas(engine, settings.project)
    finally:
        await prometheus.close()
        await probe.close()
        await engine.close()


async def _engine(settings: Settings, stop: asyncio.Event) -> ClusterEngine | None:
    """Connect to the engine, however long it takes; None if `stop` is set meanwhile. Raises EngineSocketGone."""
    client = await _client(stop)
    if client is None:
        return None
    if settings.on_swarm:
        return SwarmEngine(client)
    return DockerEngine(client, GpuSources(settings.gpu_cdi_kind, settings.cdi_dirs, settings.controller_image))


async def _client(stop: asyncio.Event, timeout_s: int = HTTP_TIMEOUT_S) -> APIClient | None:
    """See `_engine`."""
    while not stop.is_set():
        try:
            return await asyncio.to_thread(open_client, timeout_s=timeout_s)
        except EngineSocketGone:  # the next engine listens at another file
            raise
        except EngineUnreachable as error:
            logger.warning("waiting for the Docker Engine: %s", error)
        with contextlib.suppress(TimeoutError):  # try again
            async with asyncio.timeout(ENGINE_RETRY_S):
                await stop.wait()
    return None


async def _serve(settings: Settings, world: World, clock: Callable[[], float], stop: asyncio.Event) -> None:
    lost: EngineUnreachable | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            controller = assemble(world, tasks.create_task, clock=clock)
            async with _api(settings, controller), _discovery(settings, controller):
                controller.start(tasks.create_task)
                logger.info("controls project %s in %s", settings.project, settings.project_dir)
                await _end_with(stop)
    except* _Stopped:
        logger.info("stopping")
    except* EngineUnreachable as group:
        lost = EngineUnreachable(str(group.exceptions[0]))
    if lost is not None:
        raise lost


def _give_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop more threads than the default, which is a few more than cores: look-ups of names that get no answer
    occupy a thread for long, and commands to HAProxy must not wait for one.
    """
    loop.set_default_executor(ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="asyncio"))


async def _end_with(stop: asyncio.Event) -> None:
    await stop.wait()
    raise _Stopped


@contextlib.asynccontextmanager
async def _api(settings: Settings, controller: Controller) -> AsyncIterator[None]:
    application = controller.api(Gatekeeper(settings.api_token)).application()
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.api_host, settings.api_port).start()
        yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _discovery(settings: Settings, controller: Controller) -> AsyncIterator[None]:
    server = DiscoveryServer(controller.board, settings.api_host, settings.discovery_port)
    await server.start()
    try:
        yield
    finally:
        await server.stop()


def main() -> int:
    """Start the daemon; return its exit code."""
    try:
        settings = Settings.from_env(os.environ)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    log.configure(settings.log_level)
    try:
        asyncio.run(run(settings))
    except ControllerError as error:
        logger.error("%s", error)  # noqa: TRY400 - a traceback would add nothing
        return error.exit_code
    return 0


if __name__ == "__main__":
    # The objects that imports created are never freed. A garbage collection that scanned them would block the event
    # loop for as long as ten ticks.
    gc.collect()
    gc.freeze()
    code = main()
    # A call that hangs in a thread (to the engine, of an autoscaling function) must not keep the process from ending.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
