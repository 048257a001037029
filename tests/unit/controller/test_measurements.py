"""What Prometheus says: one number or a sentence that says why not; the last good one counts for three periods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from controller.desired.measurements import AGAIN_S, BREAK_S, FIRST_S, Measurements, Prometheus, number_in
from controller.errors import PolicyError
from controller.model.spec import AutoscaleSpec, PrometheusPolicy, ServiceSpec
from tests.unit.controller.control import until
from tests.unit.controller.worlds import service

POLICY = PrometheusPolicy("avg(gpu)", 70.0, "http://prom", period_s=2.0)


def answer(kind: str, result: Any) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode()


def sample(value: str) -> dict[str, Any]:
    return {"metric": {}, "value": [1.0, value]}


@pytest.mark.parametrize(
    ("body", "value"),
    [(answer("vector", [sample("91.5")]), 91.5), (answer("scalar", [1.0, "3"]), 3.0)],
)
def test_one_number(body: bytes, value: float) -> None:
    assert number_in(200, body, "http://prom") == value


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
        (200, answer("vector", [sample("+Inf")]), "the query gives inf, which is no number to decide by"),
        (
            400,
            b'{"status": "error", "errorType": "bad_data", "error": "parse error:\\n unexpected end of input"}',
            "Prometheus refuses the query: parse error: unexpected end of input",
        ),
        (502, b"<html>", "http://prom answers 502 with something that is not Prometheus's"),
        (200, b"{}", "http://prom answers 200 with something that is not Prometheus's"),
        (200, b"3", "http://prom answers 200 with something that is not Prometheus's"),
        (200, answer("vector", [{}]), "http://prom answers 200 with something that is not Prometheus's"),
    ],
)
def test_what_is_no_number(status: int, body: bytes, problem: str) -> None:
    with pytest.raises(PolicyError) as failed:
        number_in(status, body, "http://prom")
    assert str(failed.value) == problem


class TestPrometheus:
    async def ask(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]], policy: PrometheusPolicy = POLICY
    ) -> float:
        app = web.Application()
        app.router.add_post("/api/v1/query", handler)
        prometheus = Prometheus()
        try:
            async with TestServer(app) as server:
                url = f"http://127.0.0.1:{server.port}"
                return await prometheus(
                    "llm", PrometheusPolicy(policy.query, policy.target, url, timeout_s=policy.timeout_s)
                )
        finally:
            await prometheus.close()

    async def test_the_service_is_named_in_the_query(self) -> None:
        async def handler(request: web.Request) -> web.Response:
            form = await request.post()
            assert form["query"] == 'avg(x{service="llm"}) / $services'
            return web.Response(body=answer("scalar", [1.0, "4"]))

        assert await self.ask(handler, PrometheusPolicy('avg(x{service="$service"}) / $services', 1.0)) == 4.0

    async def test_an_endless_answer_is_not_read(self) -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"x" * 65536)

        with pytest.raises(PolicyError, match="larger than 1 MiB"):
            await self.ask(handler)

    async def test_no_answer_in_time(self) -> None:
        async def handler(request: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

        with pytest.raises(PolicyError, match=r"no answer from http://127.0.0.1:[0-9]+ within 0.2 s"):
            await self.ask(handler, PrometheusPolicy("up", 1.0, timeout_s=0.2))

    async def test_nobody_there(self) -> None:
        prometheus = Prometheus()
        with pytest.raises(PolicyError, match=r"no connection to http://127.0.0.1:1: "):
            await prometheus("llm", PrometheusPolicy("up", 1.0, "http://127.0.0.1:1"))
        await prometheus.close()

    @pytest.mark.parametrize("url", ["http://prom..local:9090", f"http://{'a' * 70}:9090", "http://prom:99999"])
    async def test_an_address_that_is_none(self, url: str) -> None:
        prometheus = Prometheus()
        with pytest.raises(PolicyError, match=r"^no (valid answer from|connection to) "):
            await prometheus("llm", PrometheusPolicy("up", 1.0, url))
        await prometheus.close()


class Book:
    """Measurements with a clock and answers set by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answers: list[float | Exception] = []
        self.asked: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.measurements = Measurements(self.query, self.spawn, lambda: self.now)

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

    async def end(self) -> None:
        self.measurements.sync({})
        await until(lambda: not self.tasks)


def services(policy: PrometheusPolicy) -> dict[str, ServiceSpec]:
    return {"llm": service("llm", autoscale=AutoscaleSpec(policy=policy)), "other": service("other")}


QUICK = PrometheusPolicy("avg(gpu)", 70.0, "http://prom", period_s=0.01)


async def test_the_last_good_value_counts_for_three_periods() -> None:
    book = Book()
    assert book.value(QUICK) is None
    book.answers = [91.0]
    book.measurements.sync(services(QUICK))
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
    await until(lambda: book.measurements._watches["llm"].value == 40.0)
    assert book.value(QUICK) == 40.0
    await book.end()
    assert set(book.asked) == {"llm"}


@pytest.mark.parametrize(
    ("answers", "problem"), [([], "no answer from http://prom"), ([PolicyError("refused")], "refused")]
)
async def test_a_first_value_is_waited_for_while_it_is_needed(answers: list[float | Exception], problem: str) -> None:
    book = Book()
    book.answers = answers
    book.measurements.sync(services(POLICY))
    await until(lambda: book.asked)
    book.now += 1000.0  # nobody needed it meanwhile: no replica was ready
    for _ in range(int(FIRST_S) + 1):
        assert book.value(POLICY) is None
        book.now += 1.0
    with pytest.raises(PolicyError) as failed:
        book.value(POLICY)
    assert str(failed.value) == problem
    await book.end()


async def test_a_service_that_wakes_waits_for_a_new_value() -> None:
    book = Book()
    book.answers = [91.0]
    book.measurements.sync(services(POLICY))
    await until(lambda: book.value(POLICY) == 91.0)
    book.now += 1000.0
    assert book.value(POLICY) is None
    await book.end()


@pytest.mark.virtual_time
async def test_a_question_that_failed_is_not_put_off_for_a_long_period() -> None:
    """Prometheus begins after the controller, and a replica's series after the replica."""
    book = Book()
    book.answers = [PolicyError("no connection")]
    book.measurements.sync(services(replace(POLICY, period_s=3600.0)))
    await until(lambda: book.asked)
    book.answers = [7.0]
    await until(lambda: book.measurements._watches["llm"].value == 7.0, within_s=2 * AGAIN_S)
    asked = len(book.asked)
    await asyncio.sleep(1800.0)
    assert len(book.asked) == asked, "one that brought a value is"
    await book.end()


async def test_a_value_is_not_stale_before_the_next_answer_can_be_there() -> None:
    """A busy Prometheus takes most of timeout_s for each answer."""
    slow = PrometheusPolicy("avg(gpu)", 70.0, "http://prom", period_s=1.0, timeout_s=4.0)
    book = Book()
    book.answers = [91.0]
    book.measurements.sync(services(slow))
    await until(lambda: book.value(slow) == 91.0)
    book.answers = []
    for _ in range(int(slow.period_s + slow.timeout_s)):
        book.now += 1.0
        assert book.value(slow) == 91.0
    await book.end()


async def test_an_edited_query_is_asked_afresh_and_a_removed_one_no_more() -> None:
    book = Book()
    book.answers = [1.0]
    book.measurements.sync(services(QUICK))
    await until(lambda: book.value(QUICK) == 1.0)
    other = PrometheusPolicy("avg(other)", 1.0, "http://prom", period_s=0.01)
    book.answers = []
    book.measurements.sync(services(other))
    assert book.value(other) is None
    book.measurements.sync({})
    await until(lambda: not book.tasks)


async def test_a_defect_in_asking_is_told_and_asked_over(caplog: pytest.LogCaptureFixture) -> None:
    book = Book()
    book.answers = [KeyError("label")]
    book.measurements.sync(services(QUICK))
    await until(lambda: book.asked)
    while book.now <= 100.0 + FIRST_S:
        assert book.value(QUICK) is None
        book.now += BREAK_S
    with pytest.raises(PolicyError, match="internal: asking for llm's value raised KeyError"):
        book.value(QUICK)
    book.answers = [7.0]
    asked = len(book.asked)
    await until(lambda: len(book.asked) >= asked + 2)
    assert book.value(QUICK) == 7.0
    assert caplog.text.count("Traceback") == 1
    await book.end()
