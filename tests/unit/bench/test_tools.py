from __future__ import annotations

import pytest

from tests.bench.load.tools import read_h2load

SAID = """\
finished in 2.00s, 5000.00 req/s, 500.00KB/s
requests: 10000 total, 10000 started, 10000 done, 10000 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 10000 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 1.00MB (1048576) total, 400KB (409600) headers (space savings 50.00%), 127KB (130000) data
"""


def test_what_h2load_says() -> None:
    found = read_h2load(SAID, list(range(1, 1001)), answer_bytes=13)
    assert (found.requests, found.seconds, found.errors) == (10000, 2.0, {})
    assert found.latency_ms["p50"] == pytest.approx(0.5, abs=0.01)
    assert found.latency_ms["max"] == 1.0
    # A refused gRPC call is a status 200 to h2load.
    refused = read_h2load(SAID.replace("(130000)", "(117000)"), [1, 2], answer_bytes=13)
    assert refused.errors == {"without a message": 1000}
