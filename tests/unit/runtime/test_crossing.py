"""From one event loop to another: order, outcomes, cancellation, contexts, bounded streams."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from pierhead.replica.thread.crossing import WINDOW, Crossing, HandOver, Mailbox

from tests.unit.runtime.harness import until

VARIABLE: ContextVar[str] = ContextVar("test_crossing", default="unset")


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Ways:
    def __init__(self, elsewhere: asyncio.AbstractEventLoop) -> None:
        self.here = Mailbox(asyncio.get_running_loop())
        self.there = Mailbox(elsewhere)

    def cross(self, function: Any, *args: Any) -> Crossing[Any]:
        return Crossing(self.here, self.there, function, *args)

    async def run(self, function: Any, *args: Any) -> Any:
        return await self.cross(function, *args).result()


@pytest.fixture
async def ways(elsewhere: asyncio.AbstractEventLoop) -> Ways:
    return Ways(elsewhere)


class TestMailbox:
    async def test_a_letter_that_fails_holds_up_no_other(self, ways: Ways, caplog: pytest.LogCaptureFixture) -> None:
        got: list[int] = []
        ways.here.post(got.append, 1)
        ways.here.post(lambda: 1 / 0)
        ways.here.post(got.append, 2)
        await until(lambda: got == [1, 2], "the letters around it arrived")
        assert "ZeroDivisionError" in caplog.text

    def test_a_closed_loop_gets_none(self) -> None:
        loop = asyncio.new_event_loop()
        loop.close()
        Mailbox(loop).post(pytest.fail)


class TestCrossing:
    async def test_an_exception_arrives_with_where_it_was_raised(self, ways: Ways) -> None:
        async def deep() -> None:
            raise KeyError("lost")

        with pytest.raises(KeyError, match="lost") as caught:
            await ways.cross(deep).result()
        assert caught.traceback[-1].name == "deep"

    async def test_an_exception_is_freed_without_the_garbage_collector(self, ways: Ways) -> None:
        class Large(Exception): ...

        async def fail() -> None:
            raise Large

        gone: list[weakref.ref[Large]] = []
        gc.disable()
        try:
            try:
                await ways.cross(fail).result()
            except Large as error:
                gone.append(weakref.ref(error))
            await until(lambda: gone[0]() is None, "nothing holds it")
        finally:
            gc.enable()

    async def test_cancelling_here_cancels_there_and_waits_for_the_end(self, ways: Ways) -> None:
        begun, let_go = threading.Event(), threading.Event()

        async def slow_to_leave() -> None:
            begun.set()
            try:
                await asyncio.sleep(3600)
            finally:
                let_go.wait()

        task = asyncio.create_task(ways.run(slow_to_leave))
        await until(begun.is_set, "it runs")
        task.cancel()
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done(), "it still uses what its caller counts"
        let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_a_cancellation_from_within_is_one_here(self, ways: Ways) -> None:
        async def cancel_itself() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        with pytest.raises(asyncio.CancelledError):
            await ways.cross(cancel_itself).result()
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling(), "nobody has cancelled this one"

    async def test_random_cancellations_leave_nothing_behind(self, ways: Ways) -> None:
        running: set[int] = set()

        async def work(number: int) -> int:
            running.add(number)
            try:
                for _ in range(number % 5):
                    await asyncio.sleep(0)
            finally:
                running.discard(number)
            return number

        tasks = [asyncio.create_task(ways.run(work, number)) for number in range(1000)]
        for number, task in enumerate(tasks):
            if number % 3 == 0:
                task.cancel()
            if number % 7 == 0:
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for number, outcome in enumerate(outcomes):
            assert outcome == number or (number % 3 == 0 and isinstance(outcome, asyncio.CancelledError))
        assert running == set()


class TestHandOver:
    async def test_the_maker_is_never_far_ahead(self, ways: Ways) -> None:
        made = 0

        async def items() -> AsyncIterator[int]:
            nonlocal made
            while True:
                made += 1
                yield made

        stream: HandOver[int] = HandOver(ways.here, ways.there)
        task = asyncio.create_task(ways.run(stream.fill, items))
        for taken in range(1, 100):
            assert await stream.next() == taken
            assert made <= taken + WINDOW
        await until(lambda: made >= 99 + WINDOW // 2, "it continues while there is room")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
