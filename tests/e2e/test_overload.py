"""Ten times what the replicas can take, through HAProxy: lines stay short, and the rest gets a time to retry after.

tests/faults/test_overload.py does the same to the services alone. That as much is done as at the peak depends on the
machine: `python -m tests.bench.recovery` measures it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.harness.load import Load, LoadResult
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import Answer, Stack, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

OVERLOAD = (Path(__file__).parent / "apps" / "overload.yaml").read_text()
PLACES = 8
QUEUE = 8
SECONDS = 5.0
ONE_TOO_MANY = 0.01
"""Of the requests of a load that has room in the line, at most: now and then HAProxy sends a server one more than its
maxconn, when several arrive in the same instant. The replica refuses it before any work, and says when to come back."""
OTHER_THREADS = min(len(os.sched_getaffinity(0)), 8) - 1
"""HAProxy's other threads: each may admit one request that has found the same last place free."""


def measured(stack: Stack, connections: int) -> LoadResult:
    """A load for some time. A client that is refused comes back after 20 ms, not after the 2 s that it is asked for."""
    load = Load([stack.url("/faulty")], connections=connections, limit_s=SECONDS)
    began = time.monotonic()
    with load:
        eventually(lambda: time.monotonic() - began >= SECONDS, "the time is over", within_s=SECONDS + 60)
    return load.result


def most(stack: Stack, metric: str) -> float:
    """The most that HAProxy has counted of something at a time, whatever the machine's speed."""
    page = request(f"http://127.0.0.1:{stack.ports['PIERHEAD_STATS_PORT']}/metrics").body.decode()
    lines = [line for line in page.splitlines() if line.startswith(f"{metric}{{") and 'proxy="svc_worker"' in line]
    return max(float(line.rpartition(" ")[2]) for line in lines)


def refused(stack: Stack) -> list[Answer]:
    """The answer to one request more, if it is a refusal."""
    answer = stack.get("/faulty")
    return [answer] if answer.status == 429 else []


def test_overload_is_refused_and_what_is_accepted_is_done(written: WrittenStack) -> None:
    written.become(OVERLOAD, worker=2)
    eventually(lambda: written.get("/faulty").status == 200, "it answers")
    peak = measured(written, PLACES + QUEUE // 2)
    over = measured(written, 80)
    print(f"\npeak: {peak}\nover: {over}")
    assert peak.kinds() <= {"429"}, peak.failures[:3]
    assert peak.failed <= ONE_TOO_MANY * peak.requests
    assert over.kinds() == {"429"}, over.failures[:3]
    # An accepted request waits for those in line and in work only: what bounds their number bounds its latency.
    waited, worked = most(written, "haproxy_backend_max_queue"), most(written, "haproxy_server_max_sessions")
    assert waited <= QUEUE + OTHER_THREADS, "no line is longer than it may be"
    assert worked <= PLACES // 2 + OTHER_THREADS, "no replica has more than it takes"
    with Load([written.url("/faulty")], connections=80):
        (refusal,) = eventually(lambda: refused(written), "one is refused")
    assert refusal.headers["retry-after"] == "2"
    assert json.loads(refusal.body)["error"]["code"] == "queue_full"
    assert measured(written, PLACES // 2).failed == 0, "everything is normal again"
