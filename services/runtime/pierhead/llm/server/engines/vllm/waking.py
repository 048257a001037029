"""Waking vLLM up, by the level of its sleep."""

from __future__ import annotations

from typing import Any


async def wake_up(engine: Any, level: int) -> None:
    """Undo a sleep of vLLM's AsyncLLM.

    At level 2 the weights are gone: `wake_up` alone brings back memory with anything in it. They are read again before
    there is a cache, as reading takes memory. By the source of vLLM 0.32, which schedules requests again once both are
    back; level 2 was not seen on a GPU.
    """
    if level == 2:
        await engine.wake_up(["weights"])
        await engine.collective_rpc("reload_weights")
        await engine.wake_up(["kv_cache"])
    else:
        await engine.wake_up()
