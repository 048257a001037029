"""The application of test_runner.py: its replicas are distinguished by their ids, and do what requests say."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path

from pierhead import Broken, Service, endpoint, recheck

FOLDER = "PIERHEAD_TEST_FOLDER"
"""Files in this directory are what the test says: "go", "ill", "broken"."""


def said(word: str) -> bool:
    return Path(os.environ[FOLDER], word).exists()


def note(word: str, text: str = "") -> None:
    with Path(os.environ[FOLDER], word).open("a") as file:
        file.write(text)


async def told_to_go(word: str) -> None:
    """Say that a request is in flight, and keep it there until the test says "go"."""
    note(f"{word}-{uuid.uuid4().hex}")
    while not said("go"):  # noqa: ASYNC110 - a file of another process
        await asyncio.sleep(0.01)


class Worker(Service, replicas=2, max_ongoing_requests=1, max_queued_requests=2):
    def __init__(self) -> None:
        if said("broken"):
            raise RuntimeError("no weights")
        self.id = uuid.uuid4().hex

    async def check_health(self) -> None:
        """It is ready once a door has started, and a door once it has called a worker: they start at the same time."""
        while not said("door"):  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.01)

    async def hello(self) -> str:
        return self.id

    async def work(self) -> str:
        await told_to_go("works")
        return self.id

    async def aclose(self) -> None:
        note("closed", "worker\n")


class Door(Service, replicas=2, max_ongoing_requests=2, max_queued_requests=1, route="/"):
    def __init__(self, worker: Worker) -> None:
        if said("broken"):
            raise RuntimeError("no weights")
        if said("broken-door"):
            raise RuntimeError("no hinges")
        self.worker = worker
        self.id = uuid.uuid4().hex
        self.is_ill = self.has_met = False

    async def check_health(self) -> None:
        if not self.has_met:
            note("door")
            await self.worker.hello()
            self.has_met = True
        if self.is_ill:
            raise Broken("it will not recover")

    async def hello(self) -> str:
        return self.id

    @endpoint("GET", "/id")
    async def tell(self) -> str:
        return self.id

    @endpoint("GET", "/worker")
    async def ask(self) -> str:
        return await self.worker.work()

    @endpoint("GET", "/wait")
    async def wait(self) -> str:
        await told_to_go("waits")
        return self.id

    @endpoint("GET", "/fall-ill")
    async def fall_ill(self) -> str:
        self.is_ill = True
        recheck()
        return self.id

    async def aclose(self) -> None:
        note("closed", "door\n")


app = Door.bind(Worker.bind())
