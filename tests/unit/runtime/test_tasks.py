"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from pierhead.tasks import AGAIN_S, end_tasks

pytestmark = pytest.mark.virtual_time


async def test_tasks_end_that_swallow_cancellations_and_a_short_end_is_not_disturbed() -> None:
    ended = []

    async def swallows(cancellations: int) -> None:
        for _ in range(cancellations):
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.9 * AGAIN_S)
            ended.append(cancellations)

    tasks = [asyncio.create_task(swallows(cancellations)) for cancellations in (0, 1, 3)]
    await asyncio.sleep(0)
    await end_tasks(*tasks)
    assert ended == [0, 1, 3]
    assert all(task.cancelled() for task in tasks)
    await end_tasks(*tasks)
    await end_tasks()
