"""The controller's daemon: `python -m controller`. What it acts on: `one_machine.py`, `swarm/boundaries.py`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import uvloop
from aiohttp import web
from pierhead.discovery.served import DiscoveryServer

from .daemon import log, one_machine
from .daemon.assembly import Controller, World, assemble
from .daemon.boundaries import Boundaries
from .daemon.down import is_going_down, remove_replicas
from .daemon.edge_calls import OVER_TLS, PLAIN
from .daemon.llm_replicas import operate
from .daemon.webhook import HttpWebhook
from .errors import BeginsAgain, ControllerError, EngineUnreachable, SettingsError
from .observe.admin_pages import HttpProbe
from .observe.alertmanager import STACK_URL as ALERTMANAGER_URL
from .observe.alertmanager import Alertmanager
from .observe.prometheus import STACK_URL, Prometheus
from .settings import Settings
from .swarm import boundaries as on_swarm

logger = logging.getLogger("controller")

THREADS = 32


class _Stopped(Exception):
    """Not an error: raised at SIGTERM to end all tasks of the TaskGroup."""


async def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT; then leave the replicas (a restart) or remove them (the stack goes down)."""
    stop = asyncio.Event()
    _give_threads(asyncio.get_running_loop())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    where = on_swarm if settings.on_swarm else one_machine
    async with where.boundaries(settings, stop) as boundaries:
        if boundaries is not None:
            await _control(settings, boundaries, stop)
    logger.info("stopped")


async def _control(settings: Settings, boundaries: Boundaries, stop: asyncio.Event) -> None:
    """Control the project until `stop` is set."""
    probe, prometheus = HttpProbe(boundaries.publish), Prometheus(STACK_URL)
    webhook = HttpWebhook(settings.webhook) if settings.webhook else None
    silencer = Alertmanager(ALERTMANAGER_URL) if settings.sends_alerts else None
    world = World(
        settings.project,
        boundaries,
        probe,
        prometheus.number,
        prometheus.series,
        probe.give,
        probe.put_to_sleep,
        operate,
        prometheus.rules,
        silencer,
        is_manual=settings.is_manual,
        router_silence_s=settings.haproxy_silence_s,
        ask_contract=probe.contract,
        ask_traces=probe.traces,
        end=stop.set,
        send=webhook,
        edge=OVER_TLS if settings.has_tls else PLAIN,
        grafana_port=settings.grafana_port,
    )
    try:
        await _serve(settings, world, stop)
        if await is_going_down(boundaries.engine, settings.project):
            await remove_replicas(boundaries.engine, settings.project)
    finally:
        await prometheus.close()
        for each in (webhook, silencer):
            if each is not None:
                await each.close()


async def _serve(settings: Settings, world: World, stop: asyncio.Event) -> None:
    lost: EngineUnreachable | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            controller = assemble(world, tasks.create_task)
            async with _api(settings, controller, world.boundaries), _discovery(settings, controller):
                controller.start(tasks.create_task)
                logger.info("controls project %s in %s", settings.project, settings.project_dir or "Swarm")
                await _end_with(stop)
    except* _Stopped:
        logger.info("stopping")
    except* EngineUnreachable as group:
        lost = EngineUnreachable(str(group.exceptions[0]))
    if lost is not None:
        raise lost
    if world.boundaries.store.is_replaced:
        raise BeginsAgain("a backup was restored: this controller ends, and the next one begins with that state")


def _give_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop more threads than the default, which is a few more than cores: look-ups of names that get no answer
    occupy a thread for long, and commands to HAProxy must not wait for one.
    """
    loop.set_default_executor(ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="asyncio"))


async def _end_with(stop: asyncio.Event) -> None:
    await stop.wait()
    raise _Stopped


@contextlib.asynccontextmanager
async def _api(settings: Settings, controller: Controller, at: Boundaries) -> AsyncIterator[None]:
    application = controller.api(at.gatekeeper).application()
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        if at.api_socket is not None:  # before the port, which says that the API answers
            await web.SockSite(runner, at.api_socket).start()
        await web.TCPSite(runner, settings.api_host, settings.api_port).start()
        yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _discovery(settings: Settings, controller: Controller) -> AsyncIterator[None]:
    server = DiscoveryServer(controller.discovery_state, settings.api_host, settings.discovery_port)
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
        uvloop.run(run(settings))
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
