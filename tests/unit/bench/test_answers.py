from __future__ import annotations

import json
from typing import Any

import pytest

from services.echo.completion import DONE, CompletionStream
from tests.bench import answers
from tests.bench.answers import Answers, expected_events, stream_events
from tests.bench.cases import TOKENS
from tests.bench.processes import BenchError


def stream(message: str, count: int) -> bytes:
    events = CompletionStream("id", 0, "echo")
    return b"".join(events.event(f"{message} {i}", last=i == count - 1) for i in range(count)) + DONE


def serve(monkeypatch: pytest.MonkeyPatch, bodies: dict[str, Any]) -> None:
    def get(url: str) -> tuple[int, bytes]:
        for part, body in bodies.items():
            if part in url:
                return 200, body if isinstance(body, bytes) else json.dumps(body).encode()
        return 404, b"nothing here"

    monkeypatch.setattr(answers, "get", get)


def test_a_right_stream_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    body = stream("Hello", TOKENS)
    assert stream_events(body) == expected_events("Hello")
    serve(monkeypatch, {"/echo/stream": body})
    assert Answers().check("ours", "stream", "http://x") == len(body)


@pytest.mark.parametrize("body", [stream("Hello", TOKENS - 1), stream("Hallo", TOKENS), stream("Hello", TOKENS)[:-20]])
def test_a_wrong_stream_is_not(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    serve(monkeypatch, {"/echo/stream": body})
    with pytest.raises(BenchError):
        Answers().check("ours", "stream", "http://x")


def test_scores_must_repeat_the_first_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Answers()
    serve(monkeypatch, {"/recsys": {"scores": [0.5, 0.25]}})
    found.check("peer", "dlrm", "http://x")
    serve(monkeypatch, {"/recsys": {"scores": [0.500001, 0.25]}})
    found.check("ours", "dlrm", "http://x")
    for other in ([0.51, 0.25], [0.5]):
        serve(monkeypatch, {"/recsys": {"scores": other}})
        with pytest.raises(BenchError, match=r"user 1: ours computes .*, peer computes"):
            found.check("ours", "dlrm", "http://x")
