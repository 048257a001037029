"""`@batch`: the window as a pure thing, and the decorator around it."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead import batch
from pierhead.batching import Batcher, BatchLimits, BatchWindow, Member
from pierhead.metrics import RuntimeMetrics
from pierhead.request import CURRENT, RequestContext, current_request

from tests.unit.runtime.harness import until


def member(at: float, rows: int = 1) -> Member[float]:
    return Member(at, rows, at)


class TestWindow:
    def test_an_idle_replica_keeps_nobody_waiting(self) -> None:
        window: BatchWindow[float] = BatchWindow(BatchLimits(10, batch_wait_timeout_s=5))
        window.add(member(1.0))
        window.add(member(1.0))
        assert len(window.take(1.0)) == 2

    def test_while_a_batch_runs_arrivals_collect(self) -> None:
        window: BatchWindow[float] = BatchWindow(BatchLimits(10, batch_wait_timeout_s=5))
        window.add(member(0))
        window.take(0)
        for at in (1.0, 2.0, 3.0):
            window.add(member(at))
        assert window.take(3.0) == []
        assert window.due_at() is None
        window.finished()
        assert window.due_at() == 6.0, "the oldest one's window goes on"
        assert window.take(5.9) == []
        assert len(window.take(6.0)) == 3

    def test_a_full_batch_starts_at_once(self) -> None:
        window: BatchWindow[float] = BatchWindow(BatchLimits(2, batch_wait_timeout_s=5))
        window.add(member(0))
        window.take(0)
        window.finished()
        window._eager = False
        window._waiting.extend([member(1), member(1), member(1)])
        assert len(window.take(1)) == 2

    def test_both_bounds_hold(self) -> None:
        window: BatchWindow[float] = BatchWindow(BatchLimits(3, max_batch_rows=10))
        for rows in (4, 4, 4, 1, 1):
            window.add(member(0, rows))
        assert [m.rows for m in window.take(0)] == [4, 4]
        window.finished()
        assert [m.rows for m in window.take(9)] == [4, 1, 1]

    def test_a_request_larger_than_the_bound_goes_alone(self) -> None:
        window: BatchWindow[float] = BatchWindow(BatchLimits(3, max_batch_rows=10))
        window.add(member(0, 50))
        window.add(member(0, 1))
        assert [m.rows for m in window.take(0)] == [50]

    @given(
        st.integers(1, 5),
        st.integers(1, 3),
        st.integers(1, 20),
        st.lists(
            st.one_of(
                st.tuples(st.just("add"), st.integers(1, 8)),
                st.tuples(st.sampled_from(["take", "finish", "discard"]), st.just(0)),
            ),
            max_size=60,
        ),
    )
    def test_whatever_happens(self, size: int, running: int, rows: int, steps: list[tuple[str, int]]) -> None:
        """In order, each once, within every bound; nobody waits past the window while a batch may start."""
        limits = BatchLimits(size, 1.0, running, rows)
        window: BatchWindow[float] = BatchWindow(limits)
        waiting: list[Member[float]] = []
        now = 0.0
        for step, value in steps:
            now += 0.25
            if step == "add":
                waiting.append(member(now, value))
                window.add(waiting[-1])
            elif step == "discard" and waiting:
                window.discard(waiting.pop(len(waiting) // 2))
            elif step == "finish" and window.running:
                window.finished()
            elif step == "take":
                before = window.running
                taken = window.take(now)
                assert taken == waiting[: len(taken)]
                del waiting[: len(taken)]
                assert len(taken) <= size
                assert len(taken) <= 1 or sum(m.rows for m in taken) <= rows
                if not taken and waiting and before < running:
                    assert now < waiting[0].arrived_at + 1.0
            assert len(window) == len(waiting)
            assert window._rows == sum(m.rows for m in waiting)
            assert 0 <= window.running <= running

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            ({"max_batch_size": 0}, "max_batch_size: expected an integer >= 1, found 0"),
            ({"max_batch_rows": 1.5}, "max_batch_rows: expected an integer >= 1, found 1.5"),
            ({"max_concurrent_batches": -1}, "max_concurrent_batches: expected an integer >= 1, found -1"),
            ({"batch_wait_timeout_s": float("nan")}, "batch_wait_timeout_s: expected seconds >= 0, found nan"),
        ],
    )
    def test_limits_that_make_no_sense_are_named(self, limits: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            BatchLimits(**limits)


class Model:
    """Doubles numbers; remembers its batches; waits at its gate."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.stopped = 0
        self.requests: list[RequestContext | None] = []

    @batch(max_batch_size=4, batch_wait_timeout_s=0.02, max_batch_rows=100, batch_size_fn=lambda item: item)
    async def double(self, items: list[int]) -> list[int]:
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
    with pytest.raises(ValueError, match=r"Model\.double must return one result per request.*given 2 .*returned 1"):
        await asyncio.gather(model.double(77), model.double(1))


async def test_a_result_that_is_no_list_is_a_clear_error() -> None:
    async def wrong(items: list[int]) -> Any:
        return 5

    with pytest.raises(TypeError, match=r"must return a list .*; it returned int"):
        await Batcher(wrong, BatchLimits(), name="wrong", metrics=RuntimeMetrics())(1)


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

    @pytest.mark.parametrize("turns", range(8))
    async def test_wherever_callers_are_cancelled_the_next_one_is_served(self, turns: int) -> None:
        model = Model()
        tasks = [asyncio.create_task(_call(model, number)) for number in range(1, 10)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for number, result in enumerate(results[1::2], start=1):
            assert result == 4 * number
        assert await model.double(50) == 100


async def _call(model: Model, number: int) -> int:
    return await model.double(number)


async def test_limits_change_at_run_time() -> None:
    model = Model()
    model.double.set_max_batch_size(2)
    await asyncio.gather(*[model.double(number) for number in (1, 2, 3)])
    assert model.batches == [[1, 2], [3]]
    with pytest.raises(ValueError, match="max_batch_size"):
        model.double.set_max_batch_size(0)
    model.double.set_max_batch_rows(None)
    model.double.set_batch_wait_timeout_s(0)
    model.double.set_max_concurrent_batches(3)
    assert model.double.limits == BatchLimits(2, 0, 3, None)


async def test_a_batch_has_the_time_of_the_member_that_waits_longest() -> None:
    model = Model()

    async def call(number: int, deadline: float) -> None:
        CURRENT.set(RequestContext(f"request-{number}", deadline))
        await model.double(number)

    await asyncio.gather(call(1, 10.0), call(2, 30.0))
    assert model.requests == [RequestContext("request-1", 30.0)]


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
