"""User code of a deployment that raises what is no `Exception`: its call fails, and later calls are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pierhead import rayserve as serve
from pierhead.rayserve.exceptions import RayError
from pierhead.rayserve.handle import DeploymentHandle
from pierhead.testing import local

from tests.harness.waiting import PATIENCE_S


class Panic(BaseException):
    """As pyo3's PanicException."""


class Closed(GeneratorExit):
    """As of libraries that end their own generators."""


KINDS: dict[str, type[BaseException]] = {"panic": Panic, "closed": Closed, "exit": GeneratorExit, "stop": StopIteration}
EXITS: dict[str, type[BaseException]] = {"sys.exit": SystemExit}
"""Only within `serve.run`: a service ends, as a process does."""


def checked(word: str) -> str:
    if kind := {**KINDS, **EXITS}.get(word):
        raise kind(word)
    return word


@serve.deployment
class Raises:
    def __call__(self, word: Any) -> str:
        return checked(word if isinstance(word, str) else word.query_params["word"])

    async def on_the_loop(self, word: str) -> str:
        return checked(word)

    @serve.batch
    async def batched(self, words: list[str]) -> list[str]:
        return [checked(word) for word in words]

    def stream(self, word: str) -> Iterator[str]:
        yield checked(word)

    async def stream_on_the_loop(self, word: str) -> AsyncIterator[str]:
        yield checked(word)


METHODS = ["__call__", "on_the_loop", "batched", "stream", "stream_on_the_loop"]


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    serve.start(proxy_location="Disabled")
    raises: Any = Raises
    yield serve.run(raises.bind())
    serve.shutdown()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [*KINDS, *EXITS])
def test_a_call_fails_and_the_deployment_serves_on(handle: Any, method: str, kind: str) -> None:
    streams = method.startswith("stream")
    named = handle.options(method_name=method, stream=streams)

    def result(word: str) -> list[Any]:
        response = named.remote(word)
        return list(response) if streams else [response.result(timeout_s=60)]

    with pytest.raises((RayError, RuntimeError), match=r"SystemExit\('sys.exit'\)" if kind in EXITS else None):
        result(kind)
    assert result("word") == ["word"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_of_a_service_fails_and_the_service_serves_on(kind: str) -> None:
    raises: Any = Raises
    async with local(raises.bind()) as running:
        for method in METHODS:
            streams = method.startswith("stream")
            named = DeploymentHandle[Any]("Raises").options(method_name=method, stream=streams)
            with pytest.raises((RayError, RuntimeError)):
                async with asyncio.timeout(PATIENCE_S):
                    _ = [item async for item in named.remote(kind)] if streams else await named.remote(kind)
        async with running.http.get("/", params={"word": kind}) as response:
            assert (response.status, await response.text()) == (500, "Internal Server Error")
        async with running.http.get("/", params={"word": "word"}) as response:
            assert await response.text() == "word"
