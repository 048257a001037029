"""What a coroutine itself costs is told apart from what others do meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from controller.status.metrics import Measured, OwnTime, core_wait_s


@dataclass
class Machine:
    """A thread's counters."""

    cpu_s: float = 0.0
    waited_s: float = 0.0

    def compute(self, cpu_s: float, waits_s: float = 0.0) -> None:
        self.cpu_s += cpu_s
        self.waited_s += waits_s

    def measured(self, coroutine: object, spent: OwnTime) -> Measured[str]:
        return Measured(coroutine, spent, lambda: self.cpu_s, lambda: self.waited_s)  # type: ignore[arg-type]


async def test_steps_are_added_up_and_what_others_do_in_between_is_not() -> None:
    machine, spent, over = Machine(), OwnTime(), asyncio.Event()

    async def work() -> str:
        machine.compute(1.0, waits_s=0.5)
        await over.wait()
        machine.compute(2.0)
        return "done"

    async def others() -> None:
        machine.compute(100.0, waits_s=100.0)
        over.set()

    other = asyncio.ensure_future(others())
    assert await machine.measured(work(), spent) == "done"
    await other
    assert spent == OwnTime(cpu_s=3.0, core_wait_s=0.5)


async def test_errors_and_cancellation_go_through_and_what_was_spent_counts() -> None:
    machine, spent = Machine(), OwnTime()

    async def fail() -> str:
        machine.compute(1.0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await machine.measured(fail(), spent)
    assert spent.cpu_s == 1.0

    async def wait() -> str:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            machine.compute(2.0)
        await asyncio.Event().wait()
        return ""

    async def run() -> str:
        return await machine.measured(wait(), spent)

    task = asyncio.ensure_future(run())
    while spent.cpu_s < 3.0:  # noqa: ASYNC110 - the time limit within has to end
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_kernel_counts_how_long_a_thread_waited_for_a_core() -> None:
    assert 0.0 <= core_wait_s() <= core_wait_s()
