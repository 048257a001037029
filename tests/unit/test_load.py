"""The load of the end-to-end tests: late failures are reported after any number of earlier ones."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler

from tests.harness.http_answers import sends, serving
from tests.harness.load import MAX_FAILURES_KEPT, FailureCount, Load, LoadResult
from tests.harness.waiting import eventually


def test_failures_after_those_that_are_kept() -> None:
    result = LoadResult()
    for _ in range(MAX_FAILURES_KEPT):
        result.note_failure(99.9, 100.2, "http://a/", "OSError", "OSError: nobody")
    for begun_at, at, url in ((100.8, 100.9, "http://b/"), (100.85, 100.95, "http://a/")):
        result.note_failure(begun_at, at, url, "503", "503 b'busy'")
    for begun_at, at in ((107.5, 107.5), (107.4, 107.6)):
        result.note_failure(begun_at, at, "http://a/", "500", "500 b'broken'")
    assert (result.failed, len(result.failures)) == (MAX_FAILURES_KEPT + 4, MAX_FAILURES_KEPT)
    assert result.last_failed_begun_at == 107.5
    assert result.kinds() == {"OSError", "503", "500"}
    assert result.counts == [
        FailureCount(100, "http://a/", "OSError", MAX_FAILURES_KEPT),
        FailureCount(100, "http://b/", "503", 1),
        FailureCount(100, "http://a/", "503", 1),
        FailureCount(107, "http://a/", "500", 2),
    ]
    assert LoadResult.from_json(json.dumps(asdict(result))) == result


def test_a_server_that_keeps_failing_in_another_way() -> None:
    numbers, last = itertools.count(1), 0

    def fail(handler: BaseHTTPRequestHandler) -> None:
        """503 to more requests than are kept, then 500 to all."""
        nonlocal last
        last = next(numbers)
        sends(handler, 503 if last <= MAX_FAILURES_KEPT + 20 else 500, b"", {"Connection": "close"})

    with serving(fail) as url, Load([f"{url}/echo"], connections=10) as load:
        eventually(lambda: last > MAX_FAILURES_KEPT + 50, "it keeps failing")
    result = load.result
    assert {failure.what[:3] for failure in result.failures} == {"503"}, "the list was full before"
    assert result.kinds() == {"503", "500"}
    assert result.last_failed_begun_at > result.failures[-1].at
    assert sum(count.count for count in result.counts) == result.failed == result.requests


def test_a_load_says_how_far_it_is() -> None:
    with (
        serving(lambda handler: sends(handler, 200, b"", {"Connection": "close"})) as url,
        Load([f"{url}/"], 2) as load,
    ):
        eventually(lambda: load.so_far() >= 20, "it continues")
        assert load.is_running
    assert load.result.requests >= 20
    assert not load.is_running
