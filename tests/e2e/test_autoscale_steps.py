"""Ten times the load from one moment to the next: as many replicas as it needs, and no to and fro.

How soon is measured by `python -m tests.bench.autoscale_step`, which draws it, too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.load import Load
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.stack, pytest.mark.timeout(600)]

SLEEPER = (Path(__file__).parent / "apps" / "sleeper.yaml").read_text()
BEFORE, AFTER = 3, 30
"""Requests in flight: each connection has one at all times."""
NEEDED = 4
"""Replicas for AFTER, with the target of eight requests in flight each."""
TICKS_WATCHED = 12


def decided(stack: Stack) -> list[tuple[int, int]]:
    """The autoscaler's decisions so far, each (from, to)."""
    found = [re.findall(r"(\d+) -> (\d+) replicas", message) for message in stack.messages("autoscale")]
    return [(int(before), int(after)) for each in found for before, after in each]


def ticks(stack: Stack) -> float:
    """How often the controller has looked at the world."""
    page = stack.api("/metrics").body.decode()
    return float(re.search(r"^pierhead_controller_tick_seconds_count (\S+)$", page, re.MULTILINE)[1])  # type: ignore[index]


def test_a_step_is_answered_and_then_nothing_changes(written: WrittenStack) -> None:
    written.become(SLEEPER, sleeper=1)
    url, worker = written.url("/sleeper"), written.haproxy_worker()
    eventually(lambda: written.get("/sleeper").status == 200, "the service answers")
    with Load([url], connections=BEFORE) as steady:
        eventually(lambda: written.service("sleeper")["autoscale"]["load"] > BEFORE / 2, "the load is seen")
        assert written.is_settled("sleeper", 1)
        assert decided(written) == []
        with Load([url], connections=AFTER - BEFORE) as more:
            written.wait_settled(sleeper=NEEDED)
            # Requests spread over more replicas now, and the target stays.
            seen = ticks(written)
            eventually(lambda: ticks(written) >= seen + TICKS_WATCHED, "the controller looks again and again", 120)
            assert written.is_settled("sleeper", NEEDED)
    ups = decided(written)
    assert (ups[0][0], ups[-1][1]) == (1, NEEDED)
    assert all(before < after for before, after in ups)
    for load in (steady, more):
        load.assert_no_failure()
    assert written.haproxy_worker() == worker
