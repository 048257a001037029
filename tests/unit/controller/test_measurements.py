"""The last good value of a query to Prometheus counts for three periods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from controller.desired.measurements import AGAIN_S, BREAK_S, FIRST_S, Measurements
from controller.errors import PolicyError, PrometheusError
from controller.model.spec import PrometheusPolicy
from controller.outlive import Background
from tests.unit.controller.control import until

POLICY = PrometheusPolicy("avg(gpu)", 70.0, "http://prom", period_s=2.0)


class Book:
    """Measurements with a clock and answers set by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answers: list[float | Exception] = []
        self.asked: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.measurements = Measurements(self.query, Background(self.spawn, lambda: None, lambda: self.now))

    async def query(self, service: str, policy: PrometheusPolicy) -> float:
        self.asked.append(service)
        await asyncio.sleep(0)
        if not self.answers:
            await asyncio.Event().wait()
        found = self.answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    def spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def value(self, policy: PrometheusPolicy) -> float | None:
        return self.measurements.value("llm", policy, self.now)

    def found(self, policy: PrometheusPolicy) -> float | None:
        """The value; None also where there is an error."""
        with contextlib.suppress(PolicyError):
            return self.value(policy)
        return None


@pytest.fixture
async def book() -> AsyncIterator[Book]:
    book = Book()
    yield book
    for task in book.tasks:
        task.cancel()
    await until(lambda: not book.tasks)


QUICK = PrometheusPolicy("avg(gpu)", 70.0, "http://prom", period_s=0.01)


async def test_the_last_good_value_counts_for_three_periods(book: Book) -> None:
    book.answers = [91.0]
    assert book.value(QUICK) is None
    await until(lambda: book.value(QUICK) == 91.0)
    book.answers = [PrometheusError("the query gives nothing")]
    asked = len(book.asked)
    await until(lambda: len(book.asked) >= asked + 3)
    read_at = book.now
    while book.now + 1.0 <= read_at + QUICK.stale_after_s:
        book.now += 1.0
        assert book.value(QUICK) == 91.0
    book.now += 1.0
    with pytest.raises(PolicyError) as failed:
        book.value(QUICK)
    assert str(failed.value) == f"its last value (91) is {book.now - read_at:.0f} s old; the query gives nothing"
    book.answers = [40.0]
    await until(lambda: book.found(QUICK) == 40.0)
    assert set(book.asked) == {"llm"}


@pytest.mark.parametrize(
    ("answers", "problem"), [([], "no answer from http://prom"), ([PrometheusError("refused")], "refused")]
)
async def test_a_first_value_is_waited_for(book: Book, answers: list[float | Exception], problem: str) -> None:
    book.answers = answers
    assert book.value(POLICY) is None
    await until(lambda: book.asked)
    book.now += 1000.0  # not needed in that time: no replica was ready
    assert book.value(POLICY) is None
    await until(lambda: len(book.asked) == 2)
    for _ in range(int(FIRST_S) + 1):
        assert book.value(POLICY) is None
        book.now += 1.0
    with pytest.raises(PolicyError) as failed:
        book.value(POLICY)
    assert str(failed.value) == problem


@pytest.mark.virtual_time
async def test_a_query_that_failed_is_repeated_soon(book: Book) -> None:
    """Prometheus begins after the controller, and a replica's series after the replica."""
    book.answers = [PrometheusError("no connection")]
    rare = replace(POLICY, period_s=3600.0)
    assert book.value(rare) is None
    await until(lambda: book.asked)
    book.answers = [7.0]
    await until(lambda: book.found(rare) == 7.0, within_s=2 * AGAIN_S)
    asked = len(book.asked)
    await asyncio.sleep(1800.0)
    assert len(book.asked) == asked, "a query with a value waits for its period"


async def test_a_value_is_not_stale_before_the_next_answer_can_be_there(book: Book) -> None:
    """A busy Prometheus takes most of timeout_s for each answer."""
    slow = PrometheusPolicy("avg(gpu)", 70.0, "http://prom", period_s=1.0, timeout_s=4.0)
    book.answers = [91.0]
    await until(lambda: book.value(slow) == 91.0)
    book.answers = []
    for _ in range(int(slow.period_s + slow.timeout_s)):
        book.now += 1.0
        assert book.value(slow) == 91.0
    book.now += 1000.0
    assert book.value(slow) is None, "a service that wakes waits for a new value"


async def test_an_edited_query_is_asked_afresh_and_one_that_is_not_needed_no_more(book: Book) -> None:
    book.answers = [1.0]
    await until(lambda: book.value(QUICK) == 1.0)
    other = PrometheusPolicy("avg(other)", 1.0, "http://prom", period_s=0.01)
    assert book.value(other) is None
    await until(lambda: book.value(other) == 1.0)
    book.now += BREAK_S + 1.0
    await until(lambda: not book.tasks)
