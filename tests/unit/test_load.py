"""The load of the end-to-end tests: what fails late is told, however much failed before."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.harness.load import MAX_FAILURES_KEPT, FailureCount, Load, LoadResult
from tests.harness.waiting import eventually


def test_failures_after_those_that_are_kept() -> None:
    result = LoadResult()
    for _ in range(MAX_FAILURES_KEPT + 10):
        result.note_failure(99.9, 100.2, "http://a/", "ConnectionRefusedError", "ConnectionRefusedError: nobody")
    result.note_failure(100.8, 100.9, "http://b/", "503", "503 b'busy'")
    result.note_failure(100.85, 100.95, "http://a/", "503", "503 b'busy'")
    result.note_failure(107.5, 107.5, "http://a/", "500", "500 b'broken'")
    result.note_failure(107.4, 107.6, "http://a/", "500", "500 b'broken'")
    assert (result.failed, len(result.failures)) == (MAX_FAILURES_KEPT + 14, MAX_FAILURES_KEPT)
    assert result.last_failed_begun_at == 107.5
    assert result.kinds() == {"ConnectionRefusedError", "503", "500"}
    assert result.counts == [
        FailureCount(100, "http://a/", "ConnectionRefusedError", MAX_FAILURES_KEPT + 10),
        FailureCount(100, "http://b/", "503", 1),
        FailureCount(100, "http://a/", "503", 1),
        FailureCount(107, "http://a/", "500", 2),
    ]
    assert LoadResult.from_json(json.dumps(asdict(result))) == result


class Failing(BaseHTTPRequestHandler):
    """Answers 503 to more requests than are kept, then 500 to all."""

    protocol_version = "HTTP/1.1"
    requests = itertools.count(1)
    last = 0

    def do_GET(self) -> None:
        number = Failing.last = next(self.requests)
        self.send_response(503 if number <= MAX_FAILURES_KEPT + 20 else 500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def test_a_server_that_goes_on_failing_in_another_way() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        with Load([f"http://127.0.0.1:{server.server_address[1]}/echo"], connections=10) as load:
            eventually(lambda: Failing.last > MAX_FAILURES_KEPT + 50, "it goes on failing")
        server.shutdown()
    result = load.result
    assert {failure.what[:3] for failure in result.failures} == {"503"}, "the list was full before"
    assert result.kinds() == {"503", "500"}
    assert result.last_failed_begun_at > result.failures[-1].at
    assert sum(count.count for count in result.counts) == result.failed == result.requests
