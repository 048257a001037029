from __future__ import annotations

import json
import logging

from pierhead.logs import JsonFormatter
from pierhead.request import CURRENT, RequestContext


def line(level: int = logging.INFO, message: str = "hello %s", **extra: object) -> dict[str, str]:
    record = logging.LogRecord("pierhead", level, __file__, 1, message, ("wörld\n",), None)
    vars(record).update(extra)
    formatted = JsonFormatter("ranker", "ranker-1").format(record)
    assert "\n" not in formatted
    parsed: dict[str, str] = json.loads(formatted)
    return parsed


def test_a_line_is_json() -> None:
    parsed = line()
    assert parsed["message"] == "hello wörld\n"
    assert (parsed["level"], parsed["service"], parsed["replica"]) == ("info", "ranker", "ranker-1")
    assert parsed["time"].endswith("+00:00")
    assert "request_id" not in parsed


async def test_a_line_of_a_request_names_it() -> None:
    CURRENT.set(RequestContext("request-1", 0))
    assert line()["request_id"] == "request-1"


def test_an_exception_comes_with_its_traceback() -> None:
    error = ValueError("boom")
    parsed = line(logging.ERROR, exc_info=(ValueError, error, None))
    assert parsed["error"].endswith("ValueError: boom")
