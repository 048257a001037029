"""An application that is run again under its name, or deleted: what requests and the status see during that."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pierhead import rayserve as serve
from pierhead.rayserve.api import INSTANCE
from pierhead.rayserve.exceptions import RequestCancelledError

from tests.harness.ports import free_ports
from tests.harness.waiting import eventually

GATE = threading.Event()


@serve.deployment
class Gated:
    async def __init__(self, version: str) -> None:  # type: ignore[misc]
        self.version = version
        if version == "second":
            await asyncio.to_thread(GATE.wait)

    def __call__(self) -> str:
        return self.version


@serve.deployment(graceful_shutdown_timeout_s=0.05)
class Endless:
    async def __call__(self) -> None:
        GATE.set()
        await asyncio.Event().wait()

    async def items(self) -> AsyncIterator[int]:
        yield 1
        GATE.set()
        await asyncio.Event().wait()


@serve.deployment(max_ongoing_requests=1, graceful_shutdown_timeout_s=0.05)
class Busy:
    def __init__(self, version: str) -> None:
        self.version = version

    async def __call__(self, _: Any = None) -> str:
        if self.version == "first":
            GATE.set()
            await asyncio.Event().wait()
        return self.version


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    """Closed at first. In the end nothing waits for it, and nothing serves."""
    GATE.clear()
    yield
    GATE.set()
    serve.shutdown()


def test_a_request_that_outlasts_the_graceful_timeout_is_cancelled() -> None:
    serve.start(proxy_location="Disabled")
    endless: Any = Endless
    response = serve.run(endless.bind()).remote()
    assert GATE.wait(60)
    serve.delete("default")
    with pytest.raises(RequestCancelledError):
        response.result(timeout_s=60)


def test_a_stream_that_outlasts_the_graceful_timeout_is_cancelled() -> None:
    serve.start(proxy_location="Disabled")
    endless: Any = Endless
    items = iter(serve.run(endless.bind()).options(stream=True).items.remote())
    assert next(items) == 1
    assert GATE.wait(60)
    with ThreadPoolExecutor(1) as threads:
        following = threads.submit(lambda: next(items, "it ended well"))
        serve.delete("default")
        with pytest.raises(RequestCancelledError):
            following.result(60)


def test_an_application_that_is_deleted_while_it_starts_starts_no_more() -> None:
    serve.start(proxy_location="Disabled")
    gated: Any = Gated
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(serve.run, gated.bind("second"))
        eventually(lambda: serve.status().applications["default"].status == "DEPLOYING", "it is started")
        serve.delete("default")
        GATE.set()
        with pytest.raises(RuntimeError, match="Deploying application default failed"):
            running.result(60)


@pytest.mark.parametrize("kind", ["call", "http"])
def test_what_waits_in_a_version_that_is_replaced_gets_the_next_one(kind: str) -> None:
    [port] = free_ports(1)
    serve.start(http_options={"port": port})
    busy: Any = Busy
    handle = serve.run(busy.bind("first"))

    def asked() -> str:
        if kind == "call":
            return str(handle.remote().result(timeout_s=60))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
            return str(answer.read().decode())

    first = handle.remote()
    assert GATE.wait(60)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(asked)
        eventually(lambda: INSTANCE.start(listen=False).run(waiting()), "it waits for the only place")
        serve.run(busy.bind("second"))
        assert answer.result() == "second"
    with pytest.raises(RequestCancelledError):
        first.result(timeout_s=60)


async def waiting() -> int:
    return INSTANCE.applications["default"].waiting


def test_requests_wait_for_the_new_application() -> None:
    [port] = free_ports(1)
    serve.start(http_options={"port": port})
    gated: Any = Gated
    serve.run(gated.bind("first"))

    def get() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
            found: bytes = answer.read()
            return found

    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(serve.run, gated.bind("second"))
        eventually(lambda: serve.status().applications["default"].status == "DEPLOYING", "it is run again")
        assert serve.status().applications["default"].deployments["Gated"].replica_states == {"STARTING": 1}
        answer = threads.submit(get)
        eventually(lambda: INSTANCE.start(listen=False).run(waiting()), "the request waits")
        GATE.set()
        assert answer.result() == b"second"
        assert running.result().remote().result() == "second"
