"""A real browser for tests: Chromium in a container, driven by Playwright."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker
from docker.models.containers import Container
from playwright.async_api import Browser, Route, async_playwright

from tests.harness.place import TAG
from tests.harness.ports import free_ports
from tests.harness.stack import request
from tests.harness.waiting import eventually

IMAGE = "pierhead-test/chromium"
LABELS = {"pierhead.test": "chromium"}
NO_NETLINK = {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 0, "value": 16, "op": "SCMP_CMP_EQ"}]}
SECCOMP = json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [NO_NETLINK]})
"""Without a netlink socket (AF_NETLINK is 16), Chromium does not see the interfaces that other tests' containers add to
the machine. Each would end what a page is loading with net::ERR_NETWORK_CHANGED.
"""


@contextlib.contextmanager
def running(client: docker.DockerClient) -> Iterator[str]:
    """Chromium from its start to its end; within: the address of its debugging port. A cached build takes a second."""
    where = str(Path(__file__).parent / "chromium_container")
    client.images.build(path=where, tag=IMAGE, network_mode="host", rm=True, labels=LABELS)
    (port,) = free_ports(1)
    container = client.containers.run(
        IMAGE,
        [f"--remote-debugging-port={port}"],
        network_mode="host",
        labels=LABELS,
        security_opt=[f"seccomp={SECCOMP}"],
        detach=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        eventually(lambda: request(f"{address}/json/version").status == 200, "Chromium answers")
        yield address
    finally:
        container.remove(force=True)


@contextlib.asynccontextmanager
async def driven(address: str) -> AsyncIterator[Browser]:
    """The browser at a debugging port."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect_over_cdp(address)
        try:
            yield browser
        finally:
            await browser.close()


def container_at(client: docker.DockerClient, address: str) -> Container:
    """The container whose browser has this debugging port."""
    (found,) = [
        each
        for each in client.containers.list(filters={"label": "pierhead.test=chromium"})
        if f"--remote-debugging-port={address.rpartition(':')[2]}" in each.attrs["Args"]
    ]
    return found


def console_libraries(client: docker.DockerClient, directory: Path) -> Path:
    """The directory of the console's libraries: those of the controller's image, copied into `directory`."""
    container = client.containers.create(f"pierhead/controller:{TAG}", labels={"pierhead.test": "console"})
    try:
        chunks, _ = container.get_archive("/app/controller/console/lib")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            archive.extractall(directory, filter="data")
    finally:
        container.remove(force=True)
    return directory / "lib"


async def fulfil(route: Route, libraries: Path) -> None:
    """Answer a page's request for a library."""
    await route.fulfill(path=libraries / route.request.url.rsplit("/", 1)[-1])
