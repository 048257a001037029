"""What running replicas and callers take over without a restart, on the real stack under load: user_config, router."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.load import Load
from tests.harness.stack import ROOT, Stack, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

APP = ROOT / "compose" / "apps" / "echo.yaml"
REPLICAS = 3


@pytest.fixture
def edited() -> Iterator[tuple[Stack, Path]]:
    """The echo with three children, and its file to be edited."""
    app = ROOT / ".state" / "apps" / "echo.yaml"
    app.parent.mkdir(parents=True, exist_ok=True)
    write(app)
    try:
        with Stack("pierhead-test-config", [str(app.relative_to(ROOT))]).running() as stack:
            eventually(
                lambda: stack.get("/echo?message=hi").json == {"response": "Echo: hi"}, "it answers", within_s=120
            )
            stack.scale("echo-child", REPLICAS)
            stack.wait_settled(**{"echo-child": REPLICAS})
            yield stack, app
    finally:
        app.unlink()


def write(app: Path, **keys: str) -> None:
    """Write the application with these keys in the child's block."""
    lines = "".join(f"      {key}: {value}\n" for key, value in keys.items())
    head, child, tail = APP.read_text().replace("context: ..", f"context: {ROOT}").partition("  echo-child:\n")
    app.write_text(head + child + tail.replace("x-serve:\n", f"x-serve:\n{lines}"))


def config(stack: Stack) -> Any:
    return stack.service("echo-child")["user_config"]


def messages(stack: Stack, kind: str) -> list[str]:
    return [event["message"] for event in stack.events() if event["kind"] == kind]


def answers(stack: Stack) -> set[str]:
    """What the children say, each asked several times."""
    return {stack.get("/echo?message=hi").json["response"] for _ in range(30)}


def test_running_replicas_take_it_over_and_no_request_notices(edited: tuple[Stack, Path]) -> None:
    stack, app = edited
    before, worker = stack.replica_ids(), stack.haproxy_worker()
    with Load([stack.url("/echo?message=hi")], connections=16) as load:
        write(app, user_config="{greeting: Ahoy}")
        eventually(lambda: messages(stack, "user_config_applied"), "it has come everywhere")
        assert answers(stack) == {"Ahoy: hi"}
        [changed] = messages(stack, "user_config")
        assert changed.endswith('greeting: nothing -> "Ahoy"; no restart')
        [applied] = messages(stack, "user_config_applied")
        assert applied.endswith(f"is in force in {REPLICAS} of {REPLICAS} replicas")

        write(app, user_config="{greeting: 7}")
        eventually(lambda: len(messages(stack, "user_config_refused")) == REPLICAS, "all refuse it")
        assert answers(stack) == {"Ahoy: hi"}, "the former one stays in force"
        row = eventually(lambda: refused(stack), "the status says so")
        assert "Echo.reconfigure raised ValueError: expected {greeting: <some text>} or {}" in row["message"]
        eventually(lambda: "no restart" in stack.plan_text(), "the plan says that they go on as they are")

        stack.container("controller").kill()
        write(app, user_config="{greeting: Moin}")
        stack.container("controller").start()
        eventually(lambda: answers(stack) == {"Moin: hi"}, "the next controller goes on", within_s=120)
        eventually(lambda: stack.service("echo-child")["state"] == "HEALTHY", "all is well")
    print(f"\n{load.result}")
    load.assert_no_failure()
    assert stack.replica_ids() == before, "the same containers"
    assert stack.haproxy_worker() == worker, "not one reload"
    assert config(stack)["value"] == {"greeting": "Moin"}

    stack.scale("echo-child", REPLICAS + 1)
    stack.wait_settled(**{"echo-child": REPLICAS + 1})
    assert answers(stack) == {"Moin: hi"}, "the new one began with it"


def refused(stack: Stack) -> Any:
    """The children's row once it says that all of them refuse what is written."""
    row = stack.service("echo-child")
    return row if (row["state"], row["ready"]) == ("DEPLOY_FAILED", REPLICAS) else None


def calls(stack: Stack) -> dict[str, float]:
    """How many calls each child has had so far, by its own count."""
    found = {}
    for name, container in stack.replicas("echo-child").items():
        container.reload()
        [network] = container.attrs["NetworkSettings"]["Networks"].values()
        page = request(f"http://{network['IPAddress']}:9100/metrics").body.decode()
        lines = [line for line in page.splitlines() if line.startswith("pierhead_requests_total{") and "/Echo" in line]
        found[name] = sum(float(line.rpartition(" ")[2]) for line in lines)
    return found


def spread(stack: Stack, session: str) -> list[float]:
    """How 30 requests of one session were spread over the children, the largest share first."""
    before = calls(stack)
    for _ in range(30):
        assert request(stack.url("/echo?message=hi"), headers={"x-session-id": session}).status == 200
    after = calls(stack)
    return sorted((after[name] - before[name] for name in after), reverse=True)


def wrote(stack: Stack, before: int) -> bool:
    return len(messages(stack, "write_routing")) > before


def test_callers_go_by_another_router_and_no_request_notices(edited: tuple[Stack, Path]) -> None:
    stack, app = edited
    before = stack.replica_ids()
    assert spread(stack, "a")[0] < 30, "each request by itself"
    with Load([stack.url("/echo?message=hi")], connections=16) as load:
        for policy in ("round_robin", "least_ongoing", "consistent_hash"):
            written = len(messages(stack, "write_routing"))
            write(app, router=f"{{policy: {policy}}}")
            eventually(partial(wrote, stack, written), "HAProxy has it, and callers were told in the same tick")
    load.assert_no_failure()
    eventually(lambda: spread(stack, "a") == [30, 0, 0], "all of a session at one replica")
    assert spread(stack, "a") == [30, 0, 0]
    write(app, router="{policy: round_robin}")
    eventually(lambda: spread(stack, "a") == [10, 10, 10], "in turn")
    print(f"\n{load.result}")
    assert stack.replica_ids() == before, "the same containers, of callers and called"
