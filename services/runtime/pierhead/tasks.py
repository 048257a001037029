"""Ending tasks."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.5
"""How long a cancelled task may take to end before it is cancelled again."""


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and return when all have ended.

    A task that goes on is cancelled again: grpc.aio swallows a cancellation that meets a stream being set up.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
