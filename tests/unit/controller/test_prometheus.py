"""What the controller asks Prometheus over HTTP: one number, or series; everything else is an error with its reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from controller.errors import PrometheusError
from controller.model.spec import PrometheusPolicy
from controller.observe.prometheus import AlertRule, FiringAlert, Prometheus, Series, number_in

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
    with pytest.raises(PrometheusError) as failed:
        number_in(status, body, "http://prom")
    assert str(failed.value) == problem


async def ask(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], policy: PrometheusPolicy) -> float:
    """Ask a Prometheus that answers by `handler`."""
    app = web.Application()
    app.router.add_post("/api/v1/query", handler)
    async with TestServer(app) as server:
        return await ask_at(f"http://127.0.0.1:{server.port}", policy)


async def ask_at(url: str, policy: PrometheusPolicy = POLICY) -> float:
    prometheus = Prometheus("http://127.0.0.1:1")
    try:
        return await prometheus.number("llm", replace(policy, url=url))
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

    with pytest.raises(PrometheusError, match="larger than 1 MiB"):
        await ask(handler, POLICY)


async def test_a_prometheus_that_does_not_answer_in_time() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(PrometheusError, match=r"no answer from http://127.0.0.1:[0-9]+ within 0.2 s"):
        await ask(handler, PrometheusPolicy("up", 1.0, timeout_s=0.2))


async def test_an_address_without_a_prometheus() -> None:
    with pytest.raises(PrometheusError, match=r"^no connection to http://127.0.0.1:1: "):
        await ask_at("http://127.0.0.1:1")
    for url in ("http://prom..local:9090", f"http://{'a' * 70}:9090", "http://prom:99999"):
        with pytest.raises(PrometheusError, match=r"^no (valid answer from|connection to) "):
            await ask_at(url)


async def test_series_of_a_range() -> None:
    async def handler(request: web.Request) -> web.Response:
        form = await request.post()
        assert dict(form) == {"query": "up", "start": "10.000", "end": "40.500", "step": "5"}
        points = [[10, "1"], [15, "NaN"], [20, "0.5"]]
        return web.Response(body=answer("matrix", [{"metric": {"service": "web"}, "values": points}]))

    app = web.Application()
    app.router.add_post("/api/v1/query_range", handler)
    async with TestServer(app) as server:
        prometheus = Prometheus(f"http://127.0.0.1:{server.port}/")
        try:
            assert await prometheus.series("up", 10.0, 40.5, 5.0) == [Series({"service": "web"}, [(10, 1), (20, 0.5)])]
        finally:
            await prometheus.close()


async def test_the_rules_of_alerts_and_what_fires() -> None:
    alert = {
        "labels": {"service": "web"},
        "annotations": {"summary": "x"},
        "activeAt": "1970-01-01T00:00:10.123456789Z",
    }
    alerts = [{**alert, "state": "firing"}, {**alert, "state": "pending"}]
    rules = [
        {"type": "alerting", "name": "ErrorRate", "alerts": alerts},
        {"type": "alerting", "name": "NodeLost", "alerts": []},
        {"type": "recording", "name": "job:x"},
    ]
    body = {"status": "success", "data": {"groups": [{"rules": rules}]}}

    async def handler(request: web.Request) -> web.Response:
        assert dict(request.query) == {"type": "alert"}
        return web.json_response(body)

    app = web.Application()
    app.router.add_get("/api/v1/rules", handler)
    async with TestServer(app) as server:
        prometheus = Prometheus(f"http://127.0.0.1:{server.port}")
        errors, lost = await prometheus.rules()
        assert (errors.name, lost) == ("ErrorRate", AlertRule("NodeLost", []))
        assert errors.firing == [FiringAlert({"service": "web"}, {"summary": "x"}, 10.123456)]
        cast("Any", rules[1])["alerts"] = [{"state": "firing"}]
        with pytest.raises(PrometheusError, match="answers 200, but not as Prometheus does"):
            await prometheus.rules()
        await prometheus.close()
