"""Autoscaling policies in a stack: the project's own function, and a value from the stack's own Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.shared_stacks import WrittenStack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(600)]

POLICIES = (Path(__file__).parent / "apps" / "policies.yaml").read_text()


def test_policies_decide_and_hold_when_they_cannot(written: WrittenStack) -> None:
    # One ready replica is twice what is wanted of it, and so are two, and three.
    written.become(POLICIES, **{"by-function": 2, "by-query": 3})
    message = written.service("by-function")["message"]
    assert message == "autoscaled, 1 to 3: tests.e2e.apps.policy:wanted asks for 2"
    eventually(lambda: "= 3, 0.5 wanted" in written.service("by-query")["message"], "Prometheus has seen all three")
    written.forget_events()

    replicas = written.replica_ids()
    assert written.compose("stop", "prometheus").returncode == 0
    held = "autoscaled, 1 to 3: its policy gives no number, so 3 are held: its last value (3) is "
    eventually(
        lambda: written.service("by-query")["message"].startswith(held), "the status says why nothing is decided"
    )
    assert written.replica_ids() == replicas
    (failed,) = [event for event in written.events() if event["kind"] == "policy_failed"]
    assert (failed["service"], failed["outcome"]) == ("by-query", "warning")

    assert written.compose("start", "prometheus").returncode == 0
    eventually(
        lambda: "= 3, 0.5 wanted" in written.service("by-query")["message"], "the value decides again", within_s=120
    )
    assert written.replica_ids() == replicas
