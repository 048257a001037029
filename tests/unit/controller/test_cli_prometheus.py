"""What the command asks Prometheus, and what it does with answers of all kinds, over real HTTP."""

from __future__ import annotations

import json
import socket
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import pytest

from controller.tool.prometheus import ServiceTraffic, address, expression, read
from tests.harness.http_answers import sends, serving

ANSWER = {
    "status": "success",
    "data": {
        "resultType": "vector",
        "result": [
            {"metric": {"service": "web", "what": "rate"}, "value": [1.0, "812.4"]},
            {"metric": {"service": "web", "what": "p99_s"}, "value": [1.0, "0.0093"]},
            {"metric": {"service": "idle", "what": "rate"}, "value": [1.0, "0"]},
            {"metric": {"service": "idle", "what": "p99_s"}, "value": [1.0, "NaN"]},
        ],
    },
}


def test_one_query_gives_everything() -> None:
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        sends(handler, 200, json.dumps(ANSWER).encode())

    with serving(answer) as url:
        reading = read(url, "1m")
    assert reading.of("web") == ServiceTraffic(812.4, None, 0.0093)
    assert reading.of("idle") == ServiceTraffic(0.0, None, None), "no traffic has no quantiles"
    assert reading.of("nobody") == ServiceTraffic()
    assert reading.problem == ""
    (path,) = asked
    assert urlsplit(path).path == "/api/v1/query"
    assert parse_qs(urlsplit(path).query)["query"] == [expression("1m")]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"<html>", "is not Prometheus"),
        (200, b"[]", "is not Prometheus"),
        (200, b'{"data": {"result": [{"metric": {"service": "a", "what": "x"}, "value": [1, "1"]}]}}', "not Prometh"),
        (503, b"starting", "answered 503"),
    ],
)
def test_answers_that_are_none(status: int, body: bytes, words: str) -> None:
    with serving(lambda handler: sends(handler, status, body)) as url:
        reading = read(url)
    assert words in reading.problem
    assert reading.services == {}


def test_without_an_answer_the_reason_is_named() -> None:
    with serving(lambda handler: None) as url:
        pass
    assert f"does not answer at {url} (" in read(url).problem
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert "not answer" in read(f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.1).problem
    assert "does not say where Prometheus is" in read("").problem


def test_where_prometheus_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIERHEAD_PROMETHEUS_URL", "PIERHEAD_API_URL"):
        monkeypatch.delenv(name, raising=False)
    assert address() == "http://prometheus:9090"
    monkeypatch.setenv("PIERHEAD_API_URL", "http://gpu-box:8100")
    assert address() == "", "the stack's own name means nothing elsewhere"
    monkeypatch.setenv("PIERHEAD_PROMETHEUS_URL", "http://gpu-box:9090/")
    assert address() == "http://gpu-box:9090"
