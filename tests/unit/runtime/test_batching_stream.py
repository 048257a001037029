"""`@batch` around async generators: each caller gets a stream of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from pierhead.batching.results import ENDED, READER_PATIENCE_S, Ended, ReaderTooSlow, StreamBatcher
from pierhead.batching.window import BatchLimits
from pierhead.metrics import RuntimeMetrics

from tests.unit.runtime.harness import until
from tests.unit.runtime.test_batching import assert_idle, now, turns

pytestmark = pytest.mark.virtual_time


class Model:
    """Counts each item down to 1, and says ENDED for those that are through; 13 fails at its third step."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.steps = 0
        self.closed = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def count_down(self, items: list[int]) -> AsyncIterator[list[int | Ended]]:
        self.batches.append(items)
        try:
            for step in range(max(items)):
                await self.gate.wait()
                self.steps += 1
                if 13 in items and step == 2:
                    raise ValueError("thirteen")
                yield [item - step if item > step else ENDED for item in items]
        finally:
            self.closed += 1

    count: StreamBatcher[int, int] = StreamBatcher(count_down, BatchLimits(4, 0.01), clock=now)


async def collect(stream: AsyncIterator[int]) -> list[int]:
    return [result async for result in stream]


async def append_all(seen: list[int], stream: AsyncIterator[int]) -> None:
    async for result in stream:
        seen.append(result)  # noqa: PERF401 - what came before an error is asked for


def batcher_of(function: Callable[[list[int]], AsyncIterator[Any]], **limits: Any) -> StreamBatcher[int, int]:
    return StreamBatcher(function, BatchLimits(**limits), name="numbers", metrics=RuntimeMetrics(), clock=now)


async def test_each_caller_gets_the_stream_of_its_own_item() -> None:
    model = Model()
    streams = await asyncio.gather(*[collect(model.count(number)) for number in (3, 1, 2)])
    assert streams == [[3, 2, 1], [1], [2, 1]]
    assert (model.batches, model.steps, model.closed) == ([[3, 1, 2]], 3, 1)


async def test_streams_that_all_ended_end_the_generator() -> None:
    closed = []

    async def endless(items: list[int]) -> AsyncIterator[list[int | Ended]]:
        try:
            yield list(items)
            while True:
                yield [ENDED] * len(items)
        finally:
            closed.append(items)

    batcher = batcher_of(endless)
    assert list(await asyncio.gather(collect(batcher(1)), collect(batcher(2)))) == [[1], [2]]
    await assert_idle()
    assert closed == [[1, 2]]


async def test_a_generator_that_yields_nothing_ends_every_stream() -> None:
    async def nothing(items: list[int]) -> AsyncIterator[list[int]]:
        return
        yield

    assert await collect(batcher_of(nothing)(1)) == []


class TestErrors:
    async def test_an_exception_comes_after_the_results_before_it_and_to_every_member(self) -> None:
        model = Model()
        seen: list[int] = []

        results = await asyncio.gather(
            append_all(seen, model.count(13)), append_all(seen, model.count(7)), return_exceptions=True
        )
        assert [str(result) for result in results] == ["thirteen", "thirteen"]
        assert sorted(seen) == [6, 7, 12, 13]
        assert model.closed == 1

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                [[1]],
                r"numbers must yield one result per request, in their order; it received 2 requests and returned 1 re",
            ),
            ([5], r"numbers must yield a list with one result per request, in their order; it returned int"),
        ],
    )
    async def test_what_is_not_a_list_of_the_right_length_is_a_clear_error(self, given: Any, message: str) -> None:
        async def wrong(items: list[int]) -> AsyncIterator[Any]:
            for each in given:
                yield each

        batcher = batcher_of(wrong)
        results = await asyncio.gather(collect(batcher(1)), collect(batcher(2)), return_exceptions=True)
        for result in results:
            assert isinstance(result, ValueError | TypeError)
            assert str(result).startswith(message)


class TestLeaving:
    async def test_when_every_reader_has_left_the_generator_is_closed(self) -> None:
        model = Model()
        one, other = model.count(50), model.count(60)
        assert list(await asyncio.gather(anext(one), anext(other))) == [50, 60]
        model.gate.clear()
        await one.aclose()
        await turns(5)
        assert model.closed == 0
        await other.aclose()
        await until(lambda: model.closed == 1, "the generator is closed")
        model.gate.set()
        assert await collect(model.count(1)) == [1]

    @pytest.mark.parametrize("stay", [0, 1])
    @pytest.mark.parametrize("after", range(16))
    async def test_wherever_readers_are_cancelled_nothing_is_left(self, after: int, stay: int) -> None:
        batcher = batcher_of(countdown, max_batch_size=4, batch_wait_timeout_s=0.001)

        tasks = [asyncio.create_task(collect(batcher(number))) for number in range(10)]
        await turns(after)
        leavers = tasks[::2] if stay else tasks
        for task in leavers:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for number, (task, result) in enumerate(zip(tasks, results, strict=True)):
            whole = result == list(range(number, 0, -1))
            assert whole or (task in leavers and isinstance(result, asyncio.CancelledError))
        await assert_idle()
        assert await collect(batcher(3)) == [3, 2, 1]


async def countdown(items: list[int]) -> AsyncIterator[list[int | Ended]]:
    """Each item down to 1, in steps of which some wait and some do not."""
    for step in range(max(items)):
        if step % 3:
            await turns(2)
        yield [item - step if item > step else ENDED for item in items]


async def numbers(items: list[int]) -> AsyncIterator[list[int]]:
    """A hundred results for each item, as fast as they are taken."""
    for number in range(100):
        yield [number] * len(items)


class TestSlowReaders:
    async def test_a_reader_that_pauses_for_a_moment_gets_everything_and_buffers_are_bounded(self) -> None:
        produced = 0

        async def many(items: list[int]) -> AsyncIterator[list[int]]:
            nonlocal produced
            async for results in numbers(items):
                produced += 1
                yield results

        batcher = batcher_of(many, max_buffered_results=5)
        slow, quick = batcher(1), asyncio.create_task(collect(batcher(2)))
        assert await anext(slow) == 0
        await asyncio.sleep(READER_PATIENCE_S / 2)
        assert produced == 6, "one is read, five wait, and the batch waits with them"
        assert await collect(slow) == list(range(1, 100))
        assert await quick == list(range(100))
        await assert_idle()

    async def test_one_that_does_not_come_back_is_dropped_and_the_others_continue(self) -> None:
        batcher = batcher_of(numbers, max_buffered_results=5)
        slow, quick = batcher(1), asyncio.create_task(collect(batcher(2)))
        seen = [await anext(slow)]
        assert await quick == list(range(100))
        with pytest.raises(ReaderTooSlow) as caught:
            await append_all(seen, slow)
        assert seen == [0, 1, 2, 3, 4, 5], "the results before that can still be read"
        assert str(caught.value) == (
            "numbers: 5 results were not read (max_buffered_results), and the batch had waited 1 s for this reader; "
            "it gets no more"
        )

    async def test_patience_is_for_all_pauses_of_a_reader_together(self) -> None:
        batcher = batcher_of(numbers, max_buffered_results=1)
        read: list[int] = []

        async def read_slowly() -> None:
            async for result in batcher(1):
                read.append(result)
                await asyncio.sleep(READER_PATIENCE_S / 10)

        with pytest.raises(ReaderTooSlow):
            await read_slowly()
        assert 10 <= len(read) <= 13

    async def test_one_that_leaves_while_the_batch_waits_for_it_lets_the_batch_continue(self) -> None:
        batcher = batcher_of(numbers, max_buffered_results=2)
        slow, quick = batcher(1), asyncio.create_task(collect(batcher(2)))
        assert await anext(slow) == 0
        await turns(30)
        assert not quick.done()
        await slow.aclose()
        assert await quick == list(range(100))
        await assert_idle()
