"""`@batch` around functions that return a list."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pierhead import DeadlineExceeded, batch
from pierhead.batching.results import Batcher
from pierhead.batching.run import current_batch
from pierhead.batching.window import BatchLimits
from pierhead.metrics import RuntimeMetrics
from pierhead.request import CURRENT, RequestContext, current_request

from tests.unit.runtime.harness import until

pytestmark = pytest.mark.virtual_time


def now() -> float:
    """The clock of batches in virtual time."""
    return asyncio.get_running_loop().time()


class Model:
    """Doubles numbers; remembers its batches; waits at its gate."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.stopped = 0
        self.requests: list[RequestContext | None] = []

    async def wait_and_double(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.requests.append(current_request())
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        if 13 in items:
            raise ValueError("thirteen")
        return [2 * item for item in items]

    double: Batcher[int, int] = Batcher(
        wait_and_double, BatchLimits(4, 0.02, max_batch_rows=100), lambda item: item, clock=now
    )
    hurried: Batcher[int, int] = Batcher(wait_and_double, BatchLimits(batch_timeout_s=0.01), name="hurried", clock=now)
    wide: Batcher[int, int] = Batcher(wait_and_double, BatchLimits(4, 0, 2), clock=now)


def batcher_of(
    function: Callable[[list[int]], Awaitable[Any]], rows: Callable[[Any], int] | None = None, **limits: Any
) -> Batcher[int, int]:
    return Batcher(function, BatchLimits(**limits), rows, name="work", metrics=RuntimeMetrics(), clock=now)


async def same(items: list[int]) -> list[int]:
    return items


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def call(batcher: Batcher[int, int], number: int, request: RequestContext | None = None) -> asyncio.Task[int]:
    """A call in a task of its own, for a request."""

    async def run() -> int:
        CURRENT.set(request)
        return await batcher(number)

    return asyncio.create_task(run())


async def assert_idle() -> None:
    """No batch and no caller is left."""
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "every task has ended")


async def test_items_that_arrive_together_are_computed_together_in_each_instance() -> None:
    model, other = Model(), Model()
    *doubled, alone = await asyncio.gather(*[model.double(number) for number in range(1, 7)], other.double(7))
    assert doubled == [2, 4, 6, 8, 10, 12]
    assert alone == 14
    assert (model.batches, other.batches) == ([[1, 2, 3, 4], [5, 6]], [[7]])


async def test_an_exception_goes_to_every_member() -> None:
    model = Model()
    results = await asyncio.gather(*[model.double(number) for number in (1, 13)], return_exceptions=True)
    assert [str(result) for result in results] == ["thirteen", "thirteen"]
    assert await model.double(1) == 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([1], ValueError, r"work must return one result per request.*received 2 .*returned 1"),
        (5, TypeError, r"work must return a list .*; it returned int"),
    ],
)
async def test_a_result_of_another_length_is_an_error(given: Any, error: type[Exception], message: str) -> None:
    async def wrong(items: list[int]) -> Any:
        return given

    batcher = batcher_of(wrong)
    with pytest.raises(error, match=message):
        await asyncio.gather(batcher(1), batcher(2))


class TestCancellation:
    async def test_a_caller_that_leaves_harms_no_other(self) -> None:
        model = Model()
        model.gate.clear()
        calls = [call(model.double, 1), call(model.double, 2)]
        await until(lambda: model.batches == [[1, 2]], "a batch runs")
        waiting = [call(model.double, 3), call(model.double, 4)]
        await turns(1)
        calls[0].cancel()
        waiting[0].cancel()
        model.gate.set()
        assert await calls[1] == 4
        assert await waiting[1] == 8
        assert model.batches == [[1, 2], [4]]

    async def test_a_batch_that_every_caller_has_left_is_stopped(self) -> None:
        model = Model()
        model.gate.clear()
        tasks = [call(model.double, number) for number in (2, 3)]
        await until(lambda: len(model.batches) == 1, "the batch runs")
        for task in tasks:
            task.cancel()
        await until(lambda: model.stopped == 1, "the work is stopped")
        model.gate.set()
        assert await model.double(1) == 2

    @pytest.mark.parametrize("stay", [0, 1])
    @pytest.mark.parametrize("after", range(12))
    async def test_wherever_callers_are_cancelled_nothing_is_left(self, after: int, stay: int) -> None:
        """All of them, or every other one: before they are queued, before their batch begins, while it runs, after."""

        async def slow(items: list[int]) -> list[int]:
            await turns(3)
            return items

        batcher = batcher_of(slow, max_batch_size=4, batch_wait_timeout_s=0.001)
        tasks = [call(batcher, number) for number in range(10)]
        await turns(after)
        leavers = tasks[::2] if stay else tasks
        for task in leavers:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for number, (task, result) in enumerate(zip(tasks, results, strict=True)):
            assert result == number or (task in leavers and isinstance(result, asyncio.CancelledError))
        await assert_idle()
        assert await batcher(50) == 50

    async def test_a_cancellation_from_within_ends_every_call(self) -> None:
        async def broken(items: list[int]) -> list[int]:
            raise asyncio.CancelledError

        batcher = batcher_of(broken)
        for _ in range(2):
            with pytest.raises(asyncio.CancelledError):
                await batcher(1)
        await assert_idle()


class TestTime:
    async def test_a_batch_that_takes_too_long_is_cancelled(self) -> None:
        model = Model()
        model.gate.clear()
        results = await asyncio.gather(model.hurried(1), model.hurried(2), return_exceptions=True)
        assert [type(result) for result in results] == [DeadlineExceeded] * 2
        assert str(results[0]) == "hurried: the batch was not done within 0.01 s (batch_timeout_s); cancelled"
        await until(lambda: model.stopped == 1, "the work is stopped")
        model.gate.set()
        assert await model.hurried(3) == 6

    async def test_callers_fail_before_the_function_has_cleaned_up_and_the_place_is_free_after(self) -> None:
        cleaned = asyncio.Event()
        seen: list[list[int]] = []

        async def stubborn(items: list[int]) -> list[int]:
            seen.append(items)
            if items == [1]:
                try:
                    await asyncio.Event().wait()
                finally:
                    await cleaned.wait()
            return items

        batcher = batcher_of(stubborn, batch_timeout_s=0.01)
        with pytest.raises(DeadlineExceeded):
            await batcher(1)
        following = call(batcher, 2)
        await asyncio.sleep(1)
        assert seen == [[1]], "one batch at a time"
        cleaned.set()
        assert await following == 2

    async def test_the_items_of_a_batch_that_ended_are_freed(self) -> None:
        class Item: ...

        async def work(items: list[Any]) -> list[Any]:
            return [0 for _ in items]

        batcher, item = batcher_of(work, batch_timeout_s=60), Item()
        gone = weakref.ref(item)
        await batcher(item)  # type: ignore[arg-type]
        del item
        await assert_idle()
        await turns(1)
        gc.collect()
        assert gone() is None, "no timer holds it"

    async def test_a_request_whose_deadline_passes_is_not_computed(self) -> None:
        """In the queue, or before it arrives."""
        model = Model()
        model.gate.clear()
        first = call(model.double, 1)
        await until(lambda: model.batches == [[1]], "a batch runs")
        late, in_time = (call(model.double, item, RequestContext("r", now() + item)) for item in (2, 3))
        with pytest.raises(DeadlineExceeded):
            await call(model.double, 4, RequestContext("r", now()))
        await asyncio.sleep(2.5)
        model.gate.set()
        with pytest.raises(
            DeadlineExceeded, match="deadline passed before its batch could start; nothing was computed"
        ):
            await late
        assert (await first, await in_time) == (2, 6)
        assert model.batches == [[1], [3]]


class TestRequest:
    """The request that the code of a batch works for."""

    @pytest.mark.parametrize(
        ("deadlines", "limit_s", "of_batch"),
        [((10.0, 30.0), None, 30.0), ((10.0, None), None, float("inf")), ((1e9,), 5.0, 5.0)],
        ids=["the latest of its members", "one has none", "its own limit"],
    )
    async def test_how_much_time_a_batch_has(
        self, deadlines: tuple[float | None, ...], limit_s: float | None, of_batch: float
    ) -> None:
        seen: list[RequestContext | None] = []

        async def work(items: list[int]) -> list[int]:
            seen.append(current_request())
            return items

        batcher = batcher_of(work, batch_timeout_s=limit_s)
        requests = [None if at is None else RequestContext(f"request-{at:g}", at) for at in deadlines]
        await asyncio.gather(*[call(batcher, 1, request) for request in requests])
        assert seen == [RequestContext(f"request-{deadlines[0]:g}", of_batch)]

    async def test_a_batch_is_of_one_model_and_of_a_session_only_if_all_are(self) -> None:
        model = Model()
        asked = [(1, "s", "one"), (2, "s", "two"), (3, "t", "one"), (4, "s", "two"), (5, "s", "one")]
        await asyncio.gather(
            *[
                call(model.wide, number, RequestContext("r", 1e9, None, session, name))
                for number, session, name in asked
            ]
        )
        assert model.batches == [[1, 3, 5], [2, 4]]
        assert [(r.session_id, r.model_id) for r in model.requests if r] == [(None, "one"), ("s", "two")]

    async def test_code_of_a_batch_sees_its_members(self) -> None:
        seen: list[Any] = []

        async def work(items: list[int]) -> list[int]:
            found = current_batch()
            assert found is not None
            seen.append([r and r.request_id for r in found.requests])
            await until(lambda: not found.is_wanted(0), "the first one leaves")
            seen.append([found.is_wanted(0), found.is_wanted(1), found.is_wanted_by_any])
            return items

        batcher = batcher_of(work)
        leaver, stayer = call(batcher, 1, RequestContext("r", 1e9)), call(batcher, 2)
        await until(lambda: bool(seen), "the batch runs")
        leaver.cancel()
        assert await stayer == 2
        assert seen == [["r", None], [False, True, True]]
        assert current_batch() is None


class TestRows:
    @pytest.mark.parametrize("rows", [-1, 1.5, "two", None])
    async def test_rows_that_are_no_count_are_named(self, rows: Any) -> None:
        message = re.escape(f"batch_size_fn of work: expected the rows of one item, an integer >= 0, found {rows!r}")
        with pytest.raises(ValueError, match=message):
            await batcher_of(same, lambda _: rows)(1)

    async def test_an_error_of_a_function_that_wants_the_list_says_that_it_gets_one_item(self) -> None:
        def of_list(items: Any) -> int:
            return sum(items)

        with pytest.raises(TypeError) as caught:
            await batcher_of(same, of_list)(1)
        assert caught.value.__notes__ == ["raised by batch_size_fn of work: it is given one item, not the list of them"]


def test_a_batcher_outlives_its_event_loop_and_belongs_to_one_at_a_time() -> None:
    gate: list[asyncio.Event] = []
    begun: list[list[int]] = []

    async def work(items: list[int]) -> list[int]:
        begun.append(items)
        if gate:
            await gate[0].wait()
        return items

    batcher: Batcher[int, int] = Batcher(work, BatchLimits(), name="work", metrics=RuntimeMetrics())

    async def ask(number: int) -> int:
        return await batcher(number)

    assert asyncio.run(ask(1)) == 1
    assert asyncio.run(ask(2)) == 2

    async def busy() -> None:
        gate.append(asyncio.Event())
        task = call(batcher, 3)
        await until(lambda: [3] in begun, "a batch runs")
        with pytest.raises(RuntimeError, match="work works for another event loop"):
            await asyncio.to_thread(asyncio.run, ask(4))
        gate[0].set()
        assert await task == 3

    asyncio.run(busy())


async def test_batches_are_counted() -> None:
    metrics = RuntimeMetrics()
    batcher: Batcher[int, int] = Batcher(same, BatchLimits(), lambda item: item, name="same", metrics=metrics)
    await asyncio.gather(batcher(30), batcher(12))
    text = metrics.expose().decode()
    assert 'pierhead_batch_size_sum{batch="same",replica="",service=""} 2.0' in text
    assert 'pierhead_batch_rows_sum{batch="same",replica="",service=""} 42.0' in text
    assert 'pierhead_batch_duration_seconds_count{batch="same",replica="",service=""} 1.0' in text


async def test_a_function_can_be_batched_too() -> None:
    @batch(max_batch_size=10)
    async def triple(items: list[int]) -> list[int]:
        return [3 * item for item in items]

    assert list(await asyncio.gather(triple(1), triple(2))) == [3, 6]


def test_a_function_that_is_not_async_is_refused_at_import() -> None:
    def plain(items: list[int]) -> list[int]:
        return items

    with pytest.raises(TypeError, match="must be `async def`"):
        batch()(plain)  # type: ignore[arg-type]
