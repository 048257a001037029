"""`serve.run` beyond what the compared applications ask: the import, threads, the end, no applications."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import FastAPI
from pierhead import rayserve as serve

from tests.harness.ports import free_ports

AT_ONCE = 60
"""More than anyio allows by itself."""
MEETING = threading.Barrier(AT_ONCE)
STARTED = threading.Event()

app = FastAPI()


@serve.deployment(max_ongoing_requests=AT_ONCE)
@serve.ingress(app)
class Blocking:
    @app.get("/meet")  # type: ignore[untyped-decorator]
    def meet(self) -> int:
        """Returns once all requests are here at once."""
        return MEETING.wait(30)


@serve.deployment
class Settled:
    def reconfigure(self, user_config: Any) -> None:
        self.user_config = user_config

    def __call__(self) -> Any:
        return self.user_config


@serve.deployment(graceful_shutdown_timeout_s=0)
class Endless:
    async def __call__(self) -> None:
        STARTED.set()
        await asyncio.Event().wait()


@serve.deployment(graceful_shutdown_timeout_s=600)
class Caller:
    def __init__(self, endless: Any) -> None:
        self.endless = endless

    async def __call__(self) -> None:
        await self.endless.remote()


@pytest.fixture
def port() -> Iterator[int]:
    [found] = free_ports(1)
    serve.start(http_options={"port": found})
    yield found
    serve.shutdown()


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("module", ["requests", "responses", "websockets"])
def test_after_the_import_starlette_has_its_modules(module: str) -> None:
    program = f"import starlette; from pierhead import rayserve; print(starlette.{module}.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (f"starlette.{module}", "")


def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    program = """
import threading
from pierhead import rayserve as serve

begun = threading.Event()

@serve.deployment(graceful_shutdown_timeout_s=0)
class Endless:
    def __call__(self):
        begun.set()
        threading.Event().wait()

serve.start(proxy_location="Disabled")
response = serve.run(Endless.bind()).remote()
begun.wait()
serve.shutdown()
print("shut down")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=40)
    assert (done.returncode, done.stdout) == (0, "shut down\n"), done.stderr


def test_def_endpoints_of_fastapi_run_at_once_as_many_as_the_deployment_allows(port: int) -> None:
    serve.run(Blocking.bind())  # type: ignore[attr-defined]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda _: get(port, "/meet")[0], range(AT_ONCE)))
    assert answers == [200] * AT_ONCE


def test_without_a_proxy_no_port_is_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serve.start(proxy_location="Disabled", http_options={"port": taken.getsockname()[1]})
        try:
            assert serve.run(Endless.bind()).deployment_name == "Endless"  # type: ignore[attr-defined]
        finally:
            serve.shutdown()


def test_settings_may_be_of_any_size(port: int) -> None:
    """In containers they travel in a variable of the environment, which cannot hold as much."""
    large = {"words": "word " * 20_000}
    handle = serve.run(Settled.options(user_config=large).bind())  # type: ignore[attr-defined]
    assert handle.remote().result(timeout_s=60) == large


def test_without_applications_nothing_is_healthy(port: int) -> None:
    for path in ("/-/healthz", "/-/routes"):
        assert get(port, path) == (503, "Route table is not populated yet.")
    serve.run(Blocking.bind())  # type: ignore[attr-defined]
    assert get(port, "/-/healthz") == (200, "success")


def test_a_deployment_ends_by_its_own_time_and_by_no_other_ones(port: int) -> None:
    """The caller's request ends with that of its callee, which is cut off at once."""
    response = serve.run(Caller.bind(Endless.bind())).remote()  # type: ignore[attr-defined]
    assert STARTED.wait(60)
    serve.delete("default")  # long before the caller's 600 s are over
    with pytest.raises(Exception):  # noqa: B017, PT011 - it was cut off, however that is called
        response.result(timeout_s=60)
