"""A state volume without room: healing continues, changes that would have to be stored are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.harness.load import Load
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(300)]


@pytest.fixture
def full_disk_stack() -> Iterator[Stack]:
    with Stack("pierhead-test-full", ["compose/apps/echo.yaml", "tests/e2e/apps/full_disk.yaml"]).running() as stack:
        stack.wait_settled(echo=1, **{"echo-child": 1})
        eventually(lambda: stack.get("/echo?message=hi").status == 200, "echo answers")
        yield stack


def test_a_full_state_volume_stops_no_healing(full_disk_stack: Stack) -> None:
    stack, state = full_disk_stack, "/var/lib/pierhead"
    stack.scale("echo-child", 2)
    controller = stack.container("controller")
    with Load([stack.url("/echo?message=x")], connections=8) as load:
        code, output = controller.exec_run(["dd", "if=/dev/zero", f"of={state}/filler", "bs=1k"])
        assert code == 1, output
        victim = next(iter(stack.replicas("echo-child").values()))
        stack.kill_process(victim)
        eventually(lambda: any(each["kind"] == "replica_failed" for each in stack.events()), "the failure is reported")
        told_at = time.time()
        eventually(lambda: "state volume" in _notices(stack), "the status says what is wrong")
        eventually(lambda: victim.id not in stack.replica_ids(), "the dead replica's container is gone")
        stack.wait_settled(echo=1, **{"echo-child": 2})
        refused = stack.pierhead("scale", "echo", "2")
        assert refused.returncode == 1
        assert "state volume" in refused.stdout + refused.stderr
        assert stack.service("echo")["wanted"] == 1, "a refused change does not take effect"
        controller.exec_run(["rm", f"{state}/filler"])
        eventually(lambda: "state volume" not in _notices(stack), "there is room again")
        stack.scale("echo", 2)
    assert load.result.last_failed_begun_at <= told_at, "nobody calls it any more"
    assert load.result.failed <= 8, "only what the killed replica had begun"
    assert {"store_failing", "store_works", "replica_failed"} <= {event["kind"] for event in stack.events()}
    assert stack.container("controller").attrs["RestartCount"] == 0


def _notices(stack: Stack) -> str:
    return " ".join(stack.api("/api/v1/services").json["notices"])
