"""Ten times the load from one moment to the next: as many replicas as it needs, soon, and no to and fro.

`python -m tests.bench.autoscale_step` draws it, and goes on for minutes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.harness.load import Load
from tests.harness.machine import Pace, judge
from tests.harness.stack import Stack
from tests.harness.waiting import eventually, seconds_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

# Of tests/e2e/apps/sleeper.yaml; panic_window_s is the default.
PER_REPLICA, UPSCALE_DELAY_S, PANIC_WINDOW_S = 8, 5.0, 3.0
BEFORE, AFTER = 3, 30
"""Requests in flight: each connection has one at all times."""
NEEDED = 4
TICK_S = 1.0
START_S = 120.0
"""Three replicas at once, on a machine that does other things, too."""
TICKS_WATCHED = 12


@pytest.fixture
def sleeper_stack() -> Iterator[Stack]:
    with Stack("pierhead-test-steps", ["tests/e2e/apps/sleeper.yaml"]).running() as stack:
        eventually(lambda: stack.get("/sleeper").status == 200, "the service answers", within_s=120)
        yield stack


def decided(stack: Stack) -> list[tuple[int, int]]:
    """The autoscaler's decisions so far, each (from, to)."""
    told = [event["message"] for event in stack.events() if event["kind"] == "autoscale"]
    return [(int(a), int(b)) for words in told for a, b in re.findall(r"(\d+) -> (\d+) replicas", words)]


def ticks(stack: Stack) -> float:
    """How often the controller has looked at the world."""
    page = stack.api("/metrics").body.decode()
    return float(re.search(r"^pierhead_controller_tick_seconds_count (\S+)$", page, re.MULTILINE)[1])  # type: ignore[index]


def test_a_step_is_answered_within_the_delay_and_a_start_and_then_nothing_changes(
    sleeper_stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, url = sleeper_stack, sleeper_stack.url("/sleeper")
    worker = stack.haproxy_worker()
    with Load([url], connections=BEFORE) as steady:
        eventually(lambda: stack.service("sleeper")["autoscale"]["load"] > BEFORE / 2, "the load is seen")
        assert stack.is_settled("sleeper", 1)
        assert decided(stack) == []
        with Load([url], connections=AFTER - BEFORE) as more:
            begun = time.monotonic()
            with Pace() as pace:
                seconds_until(lambda: stack.service("sleeper")["wanted"] == NEEDED, "the target is decided")
                decided_s = time.monotonic() - begun
            stack.wait_settled(START_S, sleeper=NEEDED)
            ready_s = time.monotonic() - begun
            # Requests spread over more replicas now, and nobody thinks better of it.
            seen = ticks(stack)
            eventually(lambda: ticks(stack) >= seen + TICKS_WATCHED, "the controller looks again and again", 120)
            assert stack.is_settled("sleeper", NEEDED)
    ups = decided(stack)
    assert (ups[0][0], ups[-1][1]) == (1, NEEDED)
    assert all(before < after for before, after in ups)
    for load in (steady, more):
        load.assert_no_failure()
    assert stack.haproxy_worker() == worker
    limit_s = UPSCALE_DELAY_S + PANIC_WINDOW_S + 2 * TICK_S
    judge(decided_s <= limit_s, f"decided within {limit_s:g} s, and it was {decided_s:.1f} s", pace)
    with capsys.disabled():
        print(f"\n  1 -> {NEEDED} decided after {decided_s:.1f} s, ready after {ready_s:.1f} s; {more.result}")
