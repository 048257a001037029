"""What the console costs with many replicas: `python -m tests.bench.console_of_many 200`.

The whole controller on an engine and a HAProxy in memory, in real time, with so many replicas of one service. Ten times
a second something changes: each time an event, and the requests in flight of every replica at each probe. Prints the
share of a core of the controller without a page and with one (the client is in the same process), and with `--browser`
that of a Chromium in a container that shows the picture of the stack, then the service's page (this needs the
controller's image, for its libraries).
Replicas answer their probes from memory, so HTTP and Docker are not in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from docker.models.containers import Container

from controller.daemon.callers import Gatekeeper
from controller.observe.judge import ProbeReading
from controller.observe.prober import Subject
from tests.bench import many_replicas
from tests.fakes.fake_engine import Behaviour
from tests.harness import chromium

CHANGES_PER_S = 10
WATCHED_S = 20.0
VIEWS = {"stack": "", "service": "services/tiny"}


class Busy(many_replicas.Many):
    """Its replicas have another number of requests in flight at each probe."""

    async def ask(self, subject: Subject) -> ProbeReading:
        return replace(await super().ask(subject), ongoing=random.randrange(100))


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replicas", type=int, nargs="?", default=200)
    parser.add_argument("--browser", action="store_true", help="also in Chromium")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="pierhead-bench-") as directory:
        asyncio.run(measure(Path(directory), options.replicas, in_browser=options.browser))


async def measure(directory: Path, replicas: int, *, in_browser: bool) -> None:
    """Start, converge, change; print a line each."""
    control = many_replicas.many(directory, replicas, kind=Busy)
    control.engine.behaviours["tiny"] = Behaviour(ready_after_s=many_replicas.START_S)
    keeper = Gatekeeper((), lambda: frozenset({"127.0.0.1"}))
    async with control.running() as controller, TestServer(controller.api(keeper).application()) as server:
        await control.settled("tiny", replicas, many_replicas.LIMIT_S)
        changing = asyncio.ensure_future(change(control))
        address = f"http://127.0.0.1:{server.port}"
        try:
            rest = await share_of_this(WATCHED_S)
            print(f"{replicas} replicas, {CHANGES_PER_S} changes/s, no page: controller {rest:.1%} of a core")
            async with a_page(f"{address}/api/v1/live") as told:
                await asyncio.sleep(1)
                before = told()
                share = await share_of_this(WATCHED_S)
                kilobytes = (told() - before) / 1000 / WATCHED_S
                print(f"with a page: controller {share:.1%} of a core, {kilobytes:.0f} kB/s")
            if in_browser:
                await browse(address, directory)
        finally:
            changing.cancel()
    await control.engine.close()


async def change(control: many_replicas.Many) -> None:
    """Record an event ten times a second."""
    for number in range(10**9):
        control.controller.events.record("scale", f"change {number}", service="tiny", each=True)
        await asyncio.sleep(1 / CHANGES_PER_S)


async def share_of_this(seconds: float) -> float:
    """The share of a core that this process takes."""
    cpu = time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / seconds


@contextlib.asynccontextmanager
async def a_page(url: str) -> AsyncIterator[Callable[[], int]]:
    """A client that reads the live stream; yields how many bytes have come."""
    size = 0

    async def read() -> None:
        nonlocal size
        async with ClientSession() as client, client.get(url, raise_for_status=True) as answer:
            async for data in answer.content.iter_any():
                size += len(data)

    reading = asyncio.ensure_future(read())
    try:
        yield lambda: size
        if reading.done():
            reading.result()
    finally:
        reading.cancel()


async def browse(address: str, directory: Path) -> None:
    """What a browser takes while it shows each view."""
    with contextlib.closing(docker.DockerClient()) as engine, chromium.running(engine) as port:
        libraries = chromium.console_libraries(engine, directory)
        container = chromium.container_at(engine, port)
        async with chromium.driven(port) as browser:
            page = await browser.new_page()
            await page.route("**/console/lib/*", lambda route: chromium.fulfil(route, libraries))
            for view, path in VIEWS.items():
                await page.goto(f"{address}/#/{path}")
                await page.wait_for_selector("main h1")
                await asyncio.sleep(2)
                before, began = cpu_s(container), time.monotonic()
                controller = await share_of_this(WATCHED_S)
                share = (cpu_s(container) - before) / (time.monotonic() - began)
                print(f"Chromium, {view}: {share:.1%} of a core; the controller with it {controller:.1%}")


def cpu_s(container: Container) -> float:
    """The processor time that a container has had."""
    now: Any = container.stats(stream=False, one_shot=True)
    return float(now["cpu_stats"]["cpu_usage"]["total_usage"]) / 1e9


if __name__ == "__main__":
    main()
