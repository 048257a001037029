"""User code that calls `sys.exit` within `serve.run`: its call fails, and later calls are answered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pierhead import rayserve as serve
from pierhead.rayserve.exceptions import RayError


@serve.deployment
class Exits:
    def __call__(self, word: str) -> str:
        return sys.exit(3) if word == "exit" else word

    async def on_the_loop(self, word: str) -> str:
        return self(word)

    @serve.batch
    async def batched(self, words: list[str]) -> list[str]:
        return [self(word) for word in words]


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    serve.start(proxy_location="Disabled")
    exits: Any = Exits
    yield serve.run(exits.bind())
    serve.shutdown()


@pytest.mark.parametrize("method", ["__call__", "on_the_loop", "batched"])
def test_a_call_that_exits_fails_and_the_process_serves_on(handle: Any, method: str) -> None:
    named = handle.options(method_name=method)
    with pytest.raises(RayError, match=r"SystemExit\(3\)"):
        named.remote("exit").result(timeout_s=60)
    assert named.remote("word").result(timeout_s=60) == "word"
