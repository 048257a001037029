"""Whether what is measured gives the right answers, and the same ones on both sides. Asked before every measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.cases import TOKENS
from tests.bench.processes import BenchError, get

USERS = (1, 7, 500, 1000)
SCORE_TOLERANCE = 2e-5
"""float32 sums in another order: batches of another size are computed in other chunks."""


@dataclass
class Answers:
    """Checks answers; keeps the first subject's scores, which all others must repeat."""

    scores: dict[int, Sequence[float]] = field(default_factory=dict)
    of: str = ""

    def check(self, subject: str, app: str, url: str, headers: Mapping[str, str] | None = None) -> int:
        """Ask and compare; the size in bytes of a right answer's body. Raises BenchError at the first wrong one."""
        if app == "echo":
            for message in ("", "hi%20there"):
                _expect(subject, json.loads(_body(f"{url}/echo?message={message}", headers)), echo_answer(message))
            return len(_body(f"{url}/echo?message=", headers))
        if app == "stream":
            body = _body(f"{url}/echo/stream?message=Hello&num_tokens={TOKENS}", headers)
            _expect(subject, stream_events(body), expected_events("Hello"))
            return len(body)
        for user in USERS:
            self._same_scores(subject, user, json.loads(_body(f"{url}/recsys/?user_id={user}", headers))["scores"])
        return 1  # its length depends on the numbers

    def _same_scores(self, subject: str, user: int, scores: Sequence[float]) -> None:
        if user not in self.scores:
            self.scores[user], self.of = scores, subject
        known = self.scores[user]
        if len(scores) != len(known) or not all(
            math.isclose(a, b, abs_tol=SCORE_TOLERANCE) for a, b in zip(scores, known, strict=True)
        ):
            raise BenchError(f"user {user}: {subject} computes {scores[:3]}..., {self.of} computes {known[:3]}...")


def echo_answer(quoted: str) -> dict[str, str]:
    """What the echo answers to a message."""
    return {"response": "Echo: " + quoted.replace("%20", " ")}


def expected_events(message: str) -> list[tuple[str, str | None]]:
    """Text and finish reason of every event of a stream."""
    return [(f"{message} {index}", "stop" if index == TOKENS - 1 else None) for index in range(TOKENS)]


def stream_events(body: bytes) -> list[tuple[str, str | None]]:
    """Read server-sent events; raises BenchError when they do not end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    if not lines or lines.pop() != "[DONE]":
        raise BenchError(f"a stream did not end with [DONE]: ...{body[-80:]!r}")
    choices: list[Mapping[str, Any]] = [json.loads(line)["choices"][0] for line in lines]
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


def _body(url: str, headers: Mapping[str, str] | None) -> bytes:
    status, body = get(url, headers=headers)
    if status != 200:
        raise BenchError(f"GET {url}: status {status}, {body[:200]!r}")
    return body


def _expect(subject: str, found: object, expected: object) -> None:
    if found != expected:
        raise BenchError(f"{subject} answers {str(found)[:300]}, expected {str(expected)[:300]}")
