"""What vLLM is asked to do to wake up, in which order: with an engine that notes it."""

from __future__ import annotations

from typing import Any

import pytest
from pierhead.llm.server.engines.vllm.waking import wake_up


class Notes:
    """An AsyncLLM that sleeps."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.asked.append(("wake_up", tags))
        return tags != ["weights"]

    async def collective_rpc(self, method: str) -> list[Any]:
        self.asked.append(method)
        return [None]


@pytest.mark.parametrize(
    ("level", "asked"),
    [
        (1, [("wake_up", None)]),
        (2, [("wake_up", ["weights"]), "reload_weights", ("wake_up", ["kv_cache"])]),
    ],
)
async def test_weights_that_are_gone_are_read_before_there_is_a_cache(level: int, asked: list[Any]) -> None:
    engine = Notes()
    await wake_up(engine, level)
    assert engine.asked == asked
