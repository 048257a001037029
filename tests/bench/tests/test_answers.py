from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tests.bench import answers
from tests.bench.answers import Answers
from tests.bench.cases import TOKENS
from tests.bench.completion import DONE, CompletionStream
from tests.bench.processes import BenchError


def stream(message: str, count: int) -> bytes:
    return b"".join(map(CompletionStream(message, count).event, range(count))) + DONE


def serve(monkeypatch: pytest.MonkeyPatch, path: str, body: bytes) -> None:
    def get(url: str, headers: Mapping[str, str] | None) -> tuple[int, bytes]:
        return (200, body) if path in url else (404, b"nothing here")

    monkeypatch.setattr(answers, "get", get)


def test_a_right_stream_is_accepted_and_a_wrong_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stream("Hello", TOKENS)
    serve(monkeypatch, "/echo/stream", right)
    assert Answers().check("ours", "stream", "http://x") == len(right)
    for wrong in (stream("Hello", TOKENS - 1), stream("Hallo", TOKENS), right[:-20]):
        serve(monkeypatch, "/echo/stream", wrong)
        with pytest.raises(BenchError):
            Answers().check("ours", "stream", "http://x")


def test_scores_must_repeat_the_first_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Answers()

    def check(subject: str, *scores: float) -> None:
        serve(monkeypatch, "/recsys", json.dumps({"scores": scores}).encode())
        found.check(subject, "dlrm", "http://x")

    check("peer", 0.5, 0.25)
    check("ours", 0.500001, 0.25)
    for other in ([0.51, 0.25], [0.5]):
        with pytest.raises(BenchError, match=r"user 1: ours computes .*, peer computes"):
            check("ours", *other)
