"""`@batch` around functions that return a list."""

from __future__ import annotations

import asyncio
import gc
import re
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from random import Random
from typing import Any

import pytest
from pierhead import DeadlineExceeded, batch
from pierhead.batching.batch import Batcher, BatchLimits, current_batch
from pierhead.batching.run import Arrival, BatchRunner
from pierhead.metrics import RuntimeMetrics
from pierhead.request import CURRENT, RequestContext, current_request

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import until

WHO: ContextVar[str] = ContextVar("who", default="nobody")


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
        return [2 * item for item in items] if 77 not in items else [1]

    @batch(max_batch_size=4, batch_wait_timeout_s=0.02, max_batch_rows=100, batch_size_fn=lambda item: item)
    async def double(self, items: list[int]) -> list[int]:
        return await self.wait_and_double(items)


async def test_what_arrives_together_is_worked_on_together() -> None:
    model = Model()
    assert await asyncio.gather(*[model.double(number) for number in range(1, 7)]) == [2, 4, 6, 8, 10, 12]
    assert model.batches == [[1, 2, 3, 4], [5, 6]]


async def test_a_lone_request_does_not_wait_for_company() -> None:
    batcher: Batcher[int, int] = Batcher(_same, BatchLimits(batch_wait_timeout_s=60), metrics=RuntimeMetrics())
    started = time.monotonic()
    assert await batcher(1) == 1
    assert time.monotonic() - started < 1


async def _same(items: list[int]) -> list[int]:
    return items


async def test_each_instance_batches_for_itself() -> None:
    one, two = Model(), Model()
    await asyncio.gather(one.double(1), two.double(2))
    assert (one.batches, two.batches) == ([[1]], [[2]])


async def test_an_exception_goes_to_every_member() -> None:
    model = Model()
    results = await asyncio.gather(*[model.double(number) for number in (1, 13)], return_exceptions=True)
    assert [str(result) for result in results] == ["thirteen", "thirteen"]
    assert await Model().double(1) == 2


async def test_a_result_of_the_wrong_length_is_a_clear_error() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"Model\.double must return one result per request.*given 2 .*gave 1"):
        await asyncio.gather(model.double(77), model.double(1))


async def test_a_result_that_is_no_list_is_a_clear_error() -> None:
    async def wrong(items: list[int]) -> Any:
        return 5

    with pytest.raises(TypeError, match=r"must return a list .*; it gave int"):
        await Batcher[int, int](wrong, BatchLimits(), name="wrong", metrics=RuntimeMetrics())(1)


class TestCancellation:
    async def test_a_waiting_caller_leaves_without_harm(self) -> None:
        model = Model()
        model.gate.clear()
        first = asyncio.create_task(_call(model, 1))
        await until(lambda: len(model.batches) == 1, "a batch runs")
        leaver, stayer = asyncio.create_task(_call(model, 2)), asyncio.create_task(_call(model, 3))
        await asyncio.sleep(0)
        leaver.cancel()
        model.gate.set()
        assert list(await asyncio.gather(first, stayer)) == [2, 6]
        assert model.batches == [[1], [3]]

    async def test_a_caller_who_leaves_a_running_batch_harms_no_other(self) -> None:
        model = Model()
        model.gate.clear()
        leaver, stayer = asyncio.create_task(_call(model, 2)), asyncio.create_task(_call(model, 3))
        await until(lambda: len(model.batches) == 1, "the batch runs")
        leaver.cancel()
        await asyncio.wait([leaver])
        model.gate.set()
        assert await stayer == 6

    async def test_a_batch_that_nobody_waits_for_is_stopped(self) -> None:
        model = Model()
        model.gate.clear()
        tasks = [asyncio.create_task(_call(model, number)) for number in (2, 3)]
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
        batcher: Batcher[int, int] = Batcher(_slow_same, BatchLimits(4, 0.001), metrics=RuntimeMetrics())

        async def scenario() -> None:
            tasks = [asyncio.create_task(ask(batcher, number)) for number in range(10)]
            await turns(after)
            leavers = tasks[::2] if stay else tasks
            for task in leavers:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for number, (task, result) in enumerate(zip(tasks, results, strict=True)):
                assert result == number or (task in leavers and isinstance(result, asyncio.CancelledError))

        await scenario()
        await assert_idle(batcher)
        assert await batcher(50) == 50

    async def test_a_batch_whose_callers_leave_before_its_first_step_gives_its_place_back(self) -> None:
        ran = []

        async def never(items: list[int]) -> list[int]:
            ran.append(items)
            return items

        batcher: Batcher[int, int] = Batcher(never, BatchLimits(), metrics=RuntimeMetrics())
        task = asyncio.create_task(ask(batcher, 1))
        await started(batcher)
        assert ran == []
        task.cancel()
        await asyncio.wait([task])
        del task
        await assert_idle(batcher)
        assert await batcher(2) == 2

    async def test_a_coroutine_that_is_dropped_leaves_too(self) -> None:
        batcher: Batcher[int, int] = Batcher(_same, BatchLimits(), metrics=RuntimeMetrics())
        call = batcher(1)
        call.send(None)
        call.close()
        assert len(batcher._window) == 0
        await assert_idle(batcher)

    async def test_ten_thousand_random_cancellations_leave_nothing(self) -> None:
        rng = Random(20)
        batcher: Batcher[int, int] = Batcher(
            _slow_same, BatchLimits(8, 0.001, 3, batch_timeout_s=30), metrics=RuntimeMetrics()
        )
        cancelled = 0
        running: set[asyncio.Task[int]] = set()
        while cancelled < 10_000:
            running |= {asyncio.create_task(ask(batcher, number)) for number in range(rng.randrange(60))}
            await turns(rng.randrange(6))
            for task in rng.sample(sorted(running, key=id), k=min(len(running), rng.randrange(60))):
                cancelled += task.cancel()
            running = {task for task in running if not task.done()}
        await asyncio.wait(running)
        running.clear()
        del task
        await assert_idle(batcher)
        assert await batcher(50) == 50

    async def test_a_cancellation_that_nobody_asked_for_ends_every_call(self) -> None:
        async def broken(items: list[int]) -> list[int]:
            raise asyncio.CancelledError

        batcher: Batcher[int, int] = Batcher(broken, BatchLimits(), metrics=RuntimeMetrics())
        for _ in range(2):
            with pytest.raises(asyncio.CancelledError):
                await batcher(1)
        await assert_idle(batcher)


async def ask(batcher: Batcher[int, int], number: int) -> int:
    return await batcher(number)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def started(batcher: BatchRunner[Any]) -> None:
    """Return in the very turn in which a batch is started: its function has not run yet."""
    async with asyncio.timeout(PATIENCE_S):
        while batcher._window.running == 0:  # noqa: ASYNC110 - a poll would come too late
            await asyncio.sleep(0)


async def _slow_same(items: list[int]) -> list[int]:
    await turns(3)
    return items


async def assert_idle(batcher: BatchRunner[Any]) -> None:
    """No place, task, timer or caller is left of what has been."""
    await until(lambda: batcher._window.running == 0, "every place is given back")
    assert len(batcher._window) == 0
    assert batcher._tasks == set()
    await turns(1)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert batcher._turn is None
    assert batcher._timer is None
    gc.collect()
    assert [found for found in arrivals() if not any(found is old for old in OLD_ARRIVALS)] == []


OLD_ARRIVALS: list[Arrival] = []
"""Those that were there before a test: the traceback of one that failed keeps its own, and that is no leak."""


@pytest.fixture(autouse=True)
def _remember_arrivals() -> Iterator[None]:
    OLD_ARRIVALS[:] = arrivals()
    yield
    OLD_ARRIVALS.clear()


def arrivals() -> list[Arrival]:
    """By type(), not isinstance(): that one asks each object for its __class__, and some (torch's) warn when asked."""
    return [found for found in gc.get_objects() if type(found) is Arrival]


class TestTime:
    async def test_a_batch_that_takes_too_long_is_cancelled_and_its_callers_told(self) -> None:
        class Hurried(Model):
            @batch(batch_timeout_s=0.01)
            async def double(self, items: list[int]) -> list[int]:
                return await self.wait_and_double(items)

        model = Hurried()
        model.gate.clear()
        results = await asyncio.gather(model.double(1), model.double(2), return_exceptions=True)
        assert [type(result) for result in results] == [DeadlineExceeded] * 2
        assert str(results[0]).endswith(
            "Hurried.double: the batch was not done within 0.01 s (batch_timeout_s); cancelled"
        )
        await until(lambda: model.stopped == 1, "the work is stopped")
        model.gate.set()
        assert await model.double(3) == 6

    async def test_the_callers_are_told_before_the_function_has_cleaned_up_and_the_place_is_free_after(self) -> None:
        cleaned = asyncio.Event()

        async def stubborn(items: list[int]) -> list[int]:
            try:
                await asyncio.Event().wait()
            finally:
                await cleaned.wait()
            return items

        batcher: Batcher[int, int] = Batcher(stubborn, BatchLimits(batch_timeout_s=0.01), metrics=RuntimeMetrics())
        with pytest.raises(DeadlineExceeded):
            await batcher(1)
        assert batcher._window.running == 1
        cleaned.set()
        await assert_idle(batcher)

    async def test_a_batch_that_ends_in_time_leaves_no_timer(self) -> None:
        batcher: Batcher[int, int] = Batcher(_same, BatchLimits(batch_timeout_s=60), metrics=RuntimeMetrics())
        assert await batcher(1) == 1
        await assert_idle(batcher)

    async def test_a_request_whose_deadline_passes_in_line_is_not_computed(self) -> None:
        now = [0.0]
        seen: list[list[int]] = []
        gate = asyncio.Event()

        async def work(items: list[int]) -> list[int]:
            seen.append(items)
            await gate.wait()
            return items

        batcher: Batcher[int, int] = Batcher(work, BatchLimits(), metrics=RuntimeMetrics(), clock=lambda: now[0])
        first = asyncio.create_task(ask(batcher, 1))
        await until(lambda: seen == [[1]], "a batch runs")
        late, in_time = (asyncio.create_task(_within(batcher, item, item)) for item in (2, 3))
        await turns(1)
        now[0] = 2.0
        gate.set()
        with pytest.raises(
            DeadlineExceeded, match="deadline passed before its batch could start; nothing was computed"
        ):
            await late
        assert (await first, await in_time) == (1, 3)
        assert seen == [[1], [3]]

    async def test_a_request_that_comes_too_late_does_not_wait_to_be_told(self) -> None:
        model = Model()
        model.gate.clear()
        first = asyncio.create_task(_call(model, 1))
        await until(lambda: len(model.batches) == 1, "a batch runs")
        with pytest.raises(DeadlineExceeded):
            await asyncio.create_task(_within(model.double, 2, time.monotonic()))
        model.gate.set()
        assert await first == 2


async def _within(batcher: Batcher[int, int], item: int, deadline: float) -> int:
    CURRENT.set(RequestContext("r", deadline))
    return await batcher(item)


async def _call(model: Model, number: int) -> int:
    return await model.double(number)


async def test_a_batch_has_the_time_of_the_member_that_waits_longest() -> None:
    model = Model()
    now = time.monotonic()

    async def call(number: int, deadline: float) -> None:
        CURRENT.set(RequestContext(f"request-{number}", deadline))
        await model.double(number)

    await asyncio.gather(call(1, now + 10), call(2, now + 30))
    assert model.requests == [RequestContext("request-1", now + 30)]


async def test_a_batch_is_of_one_model_and_of_a_session_only_if_all_are() -> None:
    class Wide(Model):
        @batch(batch_wait_timeout_s=0, max_concurrent_batches=2)
        async def double(self, items: list[int]) -> list[int]:
            return await self.wait_and_double(items)

    model = Wide()

    async def call(number: int, session: str, wanted: str) -> None:
        CURRENT.set(RequestContext("r", 1e9, None, session, wanted))
        await model.double(number)

    await asyncio.gather(
        call(1, "s", "one"), call(2, "s", "two"), call(3, "t", "one"), call(4, "s", "two"), call(5, "s", "one")
    )
    assert model.batches == [[1, 3, 5], [2, 4]]
    assert [(r.session_id, r.model_id) for r in model.requests if r] == [(None, "one"), ("s", "two")]


async def test_a_request_without_a_deadline_gives_its_batch_all_the_time_there_is() -> None:
    model = Model()

    async def call() -> None:
        CURRENT.set(RequestContext("r", 1e9))
        await model.double(1)

    await asyncio.gather(call(), asyncio.create_task(_call(model, 2)))
    assert [r.deadline for r in model.requests if r] == [float("inf")]


async def test_a_batch_has_no_more_time_than_its_own_limit() -> None:
    seen = []

    async def work(items: list[int]) -> list[int]:
        seen.append(current_request())
        return items

    batcher: Batcher[int, int] = Batcher(
        work, BatchLimits(batch_timeout_s=5), metrics=RuntimeMetrics(), clock=lambda: 100.0
    )
    await asyncio.create_task(_within(batcher, 1, 1e9))
    assert [r.deadline for r in seen if r] == [105.0]


async def test_a_batch_runs_in_its_first_members_context_and_changes_nothing_there() -> None:
    seen = []

    async def work(items: list[int]) -> list[int]:
        seen.append(WHO.get())
        WHO.set("the batch")
        return items

    batcher: Batcher[int, int] = Batcher(work, BatchLimits(), metrics=RuntimeMetrics())

    async def call(who: str) -> str:
        WHO.set(who)
        await batcher(1)
        return WHO.get()

    assert list(await asyncio.gather(call("first"), call("second"))) == ["first", "second"]
    assert seen == ["first"]


async def test_code_of_a_batch_sees_its_members() -> None:
    seen: list[Any] = []

    async def work(items: list[int]) -> list[int]:
        found = current_batch()
        assert found is not None
        seen.append([r and r.request_id for r in found.requests])
        await until(lambda: not found.is_wanted(0), "the first one leaves")
        seen.append([found.is_wanted(0), found.is_wanted(1), found.is_wanted_by_any])
        return items

    batcher: Batcher[int, int] = Batcher(work, BatchLimits(), metrics=RuntimeMetrics())
    leaver, stayer = asyncio.create_task(_within(batcher, 1, 1e9)), asyncio.create_task(ask(batcher, 2))
    await until(lambda: bool(seen), "the batch runs")
    leaver.cancel()
    assert await stayer == 2
    assert seen == [["r", None], [False, True, True]]
    assert current_batch() is None


class TestRows:
    @pytest.mark.parametrize("rows", [-1, 1.5, "two", None])
    async def test_rows_that_are_no_count_are_named(self, rows: Any) -> None:
        batcher: Batcher[int, int] = Batcher(
            _same, BatchLimits(), lambda _: rows, name="score", metrics=RuntimeMetrics()
        )
        message = re.escape(f"batch_size_fn of score: expected the rows of one item, an integer >= 0, found {rows!r}")
        with pytest.raises(ValueError, match=message):
            await batcher(1)

    async def test_a_function_that_wants_the_list_is_told_that_it_gets_one_item(self) -> None:
        def of_list(items: Any) -> int:
            return sum(items)

        batcher: Batcher[int, int] = Batcher(_same, BatchLimits(), of_list, name="score", metrics=RuntimeMetrics())
        with pytest.raises(TypeError) as caught:
            await batcher(1)
        assert caught.value.__notes__ == [
            "raised by batch_size_fn of score: it is given one item, not the list of them"
        ]

    async def test_whatever_is_an_integer_counts(self) -> None:
        class Count:
            def __index__(self) -> int:
                return 7

        count: Any = Count()
        batcher: Batcher[int, int] = Batcher(_same, BatchLimits(), lambda _: count, metrics=RuntimeMetrics())
        assert await batcher(1) == 1


async def test_a_failure_that_nobody_hears_of_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work(items: list[int]) -> list[int]:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while cleaning up")

    batcher: Batcher[int, int] = Batcher(work, BatchLimits(), name="work", metrics=RuntimeMetrics())
    task = asyncio.create_task(ask(batcher, 1))
    await started(batcher)
    await turns(1)
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: batcher._window.running == 0, "the batch is over")
    assert [record.message for record in caplog.records] == ["work failed after all of its callers had left"]


def test_a_batcher_outlives_its_event_loop_and_belongs_to_one_at_a_time() -> None:
    gate: list[asyncio.Event] = []

    async def work(items: list[int]) -> list[int]:
        if gate:
            await gate[0].wait()
        return items

    batcher: Batcher[int, int] = Batcher(work, BatchLimits(), name="work", metrics=RuntimeMetrics())
    assert asyncio.run(ask(batcher, 1)) == 1
    assert asyncio.run(ask(batcher, 2)) == 2

    async def busy() -> None:
        gate.append(asyncio.Event())
        task = asyncio.create_task(ask(batcher, 3))
        await until(lambda: batcher._window.running == 1, "a batch runs")
        with pytest.raises(RuntimeError, match="work works for another event loop"):
            await asyncio.to_thread(asyncio.run, ask(batcher, 4))
        gate[0].set()
        assert await task == 3

    asyncio.run(busy())


async def test_batches_are_counted() -> None:
    metrics = RuntimeMetrics()
    batcher: Batcher[int, int] = Batcher(_same, BatchLimits(), lambda item: item, name="same", metrics=metrics)
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


async def test_an_instance_is_collected_with_its_batcher() -> None:
    model = Model()
    await model.double(1)
    gone = weakref.ref(model)
    del model
    await asyncio.sleep(0)
    gc.collect()
    assert gone() is None


def _plain(items: list[int]) -> list[int]:
    return items


def test_a_function_that_is_not_async_is_refused_at_import() -> None:
    with pytest.raises(TypeError, match="must be `async def`"):
        batch()(_plain)  # type: ignore[arg-type]
