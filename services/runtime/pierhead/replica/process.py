"""`serve()`, which a service's program calls: runs the process of a replica from start to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from pierhead.calls.clients import Clients, close_handles
from pierhead.classes.application import told_by
from pierhead.classes.parts import made
from pierhead.classes.threads import allow_threads
from pierhead.edge import logs
from pierhead.errors import PierheadError, SettingsError
from pierhead.multiplex.multiplexed import close_models
from pierhead.raised import is_answerable
from pierhead.replica.server import ReplicaServer
from pierhead.replica.watchdog import Watchdog
from pierhead.settings import Settings
from pierhead.tracebacks import where

logger = logging.getLogger("pierhead")


def serve(*parts: object, settings: Settings | None = None) -> None:
    """Serve until a stop signal; returns after a drain. Exits with 2 on bad settings, 1 when the start fails.

    A part is a service written as a class (an object of it, or what its `bind` returns: of an application of several
    services the one that PIERHEAD_SERVICE names is made and served), a generated servicer's subclass, an
    `aiohttp.web.Application` or an ASGI application (one of the two), or any object with
    `async def check_health(self) -> None`. Every part may have `check_health`: it is called once before the replica
    reports ready (it should do one real inference), every ten seconds after, and on `recheck()`. The replica is
    unhealthy once it raises three times in a row, or raises `Broken` once. A servicer's `aclose`, or else its `close`,
    is called at the end, when no request is left; either may be `async def`.
    """
    try:
        settings = settings or Settings.from_env()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    logs.configure(settings)
    try:
        asyncio.run(serve_async(*parts, settings=settings))
    except SettingsError as error:
        logger.error("%s", error)  # noqa: TRY400 - the message is enough
        raise SystemExit(2) from None
    except PierheadError as error:  # the message is enough; only the cause's traceback may help
        logger.error(  # noqa: TRY400
            "%s could not be served: %s", settings.service or "the service", error, exc_info=error.__cause__
        )
        raise SystemExit(1) from None
    except BaseException as error:
        if not is_answerable(error):
            raise
        name = settings.service or "the service"
        logger.exception("%s could not be served: %s", name, where(error))  # noqa: TRY401 - with the line of the code
        raise SystemExit(1) from None


async def serve_async(*parts: object, settings: Settings | None = None) -> None:
    """As `serve`, inside a running loop; handles SIGTERM and SIGINT while it serves, leaves logging alone."""
    settings = settings or Settings.from_env()
    allow_threads(settings)
    server = ReplicaServer(*made(parts, settings.service), settings=settings, contract=told_by(parts, settings.service))
    Clients.use(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    watching = asyncio.create_task(_watch_loop(server), name="watchdog")
    try:
        await server.run()
    finally:
        watching.cancel()
        await close_models()
        await close_handles()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _watch_loop(server: ReplicaServer) -> None:
    """Log code that blocks the loop, until cancelled. Only once the replica is ready: before, no request waits."""
    await server.ready.wait()
    watchdog = Watchdog(server.metrics)
    watchdog.start()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        watchdog.stop()
