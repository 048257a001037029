"""Ten times what the replicas can take, through HAProxy: as much is done as ever, the rest is told when to come back.

tests/faults/test_overload.py does the same to the services alone, with more callers and stricter bounds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from tests.harness.load import Load, LoadResult
from tests.harness.machine import Pace, judge
from tests.harness.stack import Answer, Stack, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

WORK_S = 0.2
PLACES = 8
QUEUE = 8
CAPACITY = PLACES / WORK_S
"""Requests a second. This and what it is made of is what tests/e2e/apps/overload.yaml says: so little that ten times as
much is nothing to a slow machine."""
TIMES = 10
SECONDS = 8.0
GOODPUT = 0.85
"""Of what is done without overload, at least: clients, HAProxy and replicas share the processors."""
ONE_TOO_MANY = 0.01
"""Of the requests of a load that has room in the line, at most: now and then HAProxy sends a server one more than its
maxconn, when several arrive in the same instant. The replica refuses it before any work, and says when to come back."""
OTHER_THREADS = min(len(os.sched_getaffinity(0)), 8) - 1
"""HAProxy's, beside the one that looks: each may let one in that has found the same last place free."""
IN_PASSING = 1.25
"""By Little's law, how many are answered and how long one takes say how many are inside, however fast the machine is.
To those in work and in line come the ones that are on their way in or out: more, where clients wait for a core."""


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack("pierhead-test-overload", ["tests/e2e/apps/overload.yaml"]).running() as stack:
        stack.wait_settled(worker=2)
        yield stack


def measured(stack: Stack, connections: int) -> LoadResult:
    """A load for some time. Whoever is refused comes back after 20 ms, not after the 2 s that the answer asks for."""
    load = Load([stack.url("/faulty")], connections=connections, limit_s=SECONDS)
    began = time.monotonic()
    with load:
        eventually(lambda: time.monotonic() - began >= SECONDS, "the time is over", within_s=SECONDS + 60)
    return load.result


def done(result: LoadResult) -> float:
    """Requests a second that were answered with 200."""
    return (result.requests - result.failed) / result.seconds


def most(stack: Stack, metric: str) -> float:
    """The most that HAProxy has counted of something at a time, whatever the machine's speed."""
    page = request(f"http://127.0.0.1:{stack.ports['PIERHEAD_STATS_PORT']}/metrics").body.decode()
    lines = [line for line in page.splitlines() if line.startswith(f"{metric}{{") and 'proxy="svc_worker"' in line]
    return max(float(line.rpartition(" ")[2]) for line in lines)


def refused(stack: Stack) -> list[Answer]:
    """The answer to one request more, if it is a refusal."""
    answer = stack.get("/faulty")
    return [answer] if answer.status == 429 else []


def test_overload_is_refused_and_what_is_accepted_is_done(stack: Stack) -> None:
    with Pace() as pace:
        peak = measured(stack, PLACES + QUEUE // 2)
        over = measured(stack, 80)
    print(f"\npeak: {done(peak):.0f}/s, {peak}\nover: {done(over):.0f}/s, {over}")
    assert peak.kinds() <= {"429"}, peak.failures[:3]
    assert peak.failed <= ONE_TOO_MANY * peak.requests
    inside, came = over.p50_ms / 1000 * done(over), over.requests / over.seconds
    waited, worked = most(stack, "haproxy_backend_max_queue"), most(stack, "haproxy_server_max_sessions")
    print(f"at a time at most {waited:g} in line, {worked:g} at a replica; {inside:.1f} inside; {came:.0f}/s came")
    assert over.kinds() == {"429"}, over.failures[:3]
    assert waited <= QUEUE + OTHER_THREADS, "no line is longer than it may be"
    assert worked <= PLACES // 2 + OTHER_THREADS, "no replica has more than it takes"
    with Load([stack.url("/faulty")], connections=80):
        (refusal,) = eventually(lambda: refused(stack), "one is refused")
    assert refusal.headers["retry-after"] == "2"
    assert json.loads(refusal.body)["error"]["code"] == "queue_full"
    after = measured(stack, PLACES // 2)
    assert after.failed == 0, "everything is normal again"
    judge(came >= TIMES * CAPACITY, f"it was an overload, and it was {came:.0f}/s", pace)
    most_inside = IN_PASSING * (PLACES + QUEUE)
    judge(inside <= most_inside, f"whoever is accepted waits for those before it only: {inside:.1f} were inside", pace)
    judge(done(over) >= GOODPUT * done(peak), f"as much is done as ever: {over}; at the peak {peak}", pace)
