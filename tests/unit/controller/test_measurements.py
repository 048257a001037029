"""The value of a query to Prometheus: one number or an error; the last good value counts for three periods."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from controller.desired.measurements import AGAIN_S, BREAK_S, FIRST_S, Measurements, Prometheus, number_in
from controller.errors import PolicyError
from controller.model.spec import PrometheusPolicy
from controller.outlive import Background
from tests.unit.controller.control import until

POLICY = PrometheusPolicy("avg(gpu)", 70.0, "http://prom", period_s=2.0)


def answer(kind: str, result: Any) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode()


def sample(value: str) -> dict[str, Any]:
    return {"metric": {}, "value": [1.0, value]}


def test_one_number() -> None:
    assert number_in(200, answer("vector", [sample("91.5")]), "http://prom") == 91.5
    assert number_in(200, answer("scalar", [1.0, "3"]), "http://prom") == 3.0


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, answer("vector", []), "the query gives nothing: no series matches it now"),
        (
            200,
            answer("vector", [sample("1"), sample("2")]),
            "the query gives 2 series; aggregate them to one (avg, max, sum)",
        ),
        (200, answer("matrix", []), "the query gives a matrix, which is not one number; an instant query does"),
        (200, answer("vector", [sample("NaN")]), "the query gives nan, which is no number to decide by"),
        (
            400,
            b'{"status": "error", "errorType": "bad_data", "error": "parse error:\\n unexpected end of input"}',
            "Prometheus refuses the query: parse error: unexpected end of input",
        ),
        (502, b"<html>", "http://prom answers 502, but not as Prometheus does"),
        (200, answer("vector", [{}]), "http://prom answers 200, but not as Prometheus does"),
    ],
)
def test_an_answer_without_one_number_says_why(status: int, body: bytes, problem: str) -> None:
    with pytest.raises(PolicyError) as failed:
        number_in(status, body, "http://prom")
    assert str(failed.value) == problem


async def ask(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], policy: PrometheusPolicy) -> float:
    """Ask a Prometheus that answers by `handler`."""
    app = web.Application()
    app.router.add_post("/api/v1/query", handler)
    async with TestServer(app) as server:
        return await ask_at(f"http://127.0.0.1:{server.port}", policy)


async def ask_at(url: str, policy: PrometheusPolicy = POLICY) -> float:
    prometheus = Prometheus()
    try:
        return await prometheus("llm", replace(policy, url=url))
    finally:
        await prometheus.close()


async def test_the_service_is_named_in_the_query() -> None:
    async def handler(request: web.Request) -> web.Response:
        form = await request.post()
        assert form["query"] == 'avg(x{service="llm"}) / $services'
        return web.Response(body=answer("scalar", [1.0, "4"]))

    assert await ask(handler, PrometheusPolicy('avg(x{service="$service"}) / $services', 1.0)) == 4.0


async def test_an_endless_answer_is_not_read() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    with pytest.raises(PolicyError, match="larger than 1 MiB"):
        await ask(handler, POLICY)


async def test_a_prometheus_that_does_not_answer_in_time() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(PolicyError, match=r"no answer from http://127.0.0.1:[0-9]+ within 0.2 s"):
        await ask(handler, PrometheusPolicy("up", 1.0, timeout_s=0.2))


async def test_an_address_without_a_prometheus() -> None:
    with pytest.raises(PolicyError, match=r"^no connection to http://127.0.0.1:1: "):
        await ask_at("http://127.0.0.1:1")
    for url in ("http://prom..local:9090", f"http://{'a' * 70}:9090", "http://prom:99999"):
        with pytest.raises(PolicyError, match=r"^no (valid answer from|connection to) "):
            await ask_at(url)


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
    book.answers = [PolicyError("the query gives nothing")]
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
    ("answers", "problem"), [([], "no answer from http://prom"), ([PolicyError("refused")], "refused")]
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
    book.answers = [PolicyError("no connection")]
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
