"""Autoscaling policies in a stack: the project's own function, and a value from the stack's own Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.machine import Pace, judge
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


@pytest.fixture
def policies_stack() -> Iterator[tuple[Stack, Pace]]:
    """The stack, and the machine's pace since before its start."""
    with Pace() as pace, Stack("pierhead-test-policies", ["tests/e2e/apps/policies.yaml"]).running() as stack:
        yield stack, pace


def failures(stack: Stack) -> list[Any]:
    return [event for event in stack.events() if event["kind"] == "policy_failed"]


def test_policies_decide_and_hold_when_they_cannot(policies_stack: tuple[Stack, Pace]) -> None:
    stack, pace = policies_stack
    eventually(lambda: stack.is_settled("by-function", 2), "the function's number", within_s=120)
    message = stack.service("by-function")["message"]
    assert message == "autoscaled, 1 to 3: tests.e2e.apps.policy:wanted asks for 2"

    # One ready replica is twice what is wanted of it, and so are two, and three.
    eventually(lambda: stack.is_settled("by-query", 3), "as many as the value asks for", within_s=120)
    told = [event["message"] for event in stack.events() if event["kind"] == "autoscale"]
    assert any('max(pierhead_service_ready_replicas{service="$service"}) = 1, 0.5 wanted' in words for words in told)

    eventually(lambda: "= 3, 0.5 wanted" in stack.service("by-query")["message"], "Prometheus has seen all three")
    early = failures(stack)

    replicas = stack.replica_ids()
    assert stack.compose("stop", "prometheus").returncode == 0
    held = "autoscaled, 1 to 3: its policy gives no number, so 3 are held: its last value (3) is "
    eventually(lambda: stack.service("by-query")["message"].startswith(held), "the status says why nothing is decided")
    assert stack.replica_ids() == replicas
    (failed,) = failures(stack)[len(early) :]
    assert (failed["service"], failed["outcome"]) == ("by-query", "warning")

    assert stack.compose("start", "prometheus").returncode == 0
    eventually(
        lambda: "= 3, 0.5 wanted" in stack.service("by-query")["message"], "the value decides again", within_s=120
    )
    assert stack.replica_ids() == replicas
    judge(not early, f"Prometheus has a value before anybody misses it: {early}", pace)
