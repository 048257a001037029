"""What running replicas and callers take over without a restart, on the real stack under load: user_config, router."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.harness.load import Load
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT, Stack, address_of, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

ECHO = (ROOT / "compose" / "apps" / "echo.yaml").read_text()
REPLICAS = 3


@pytest.fixture
def echo(written: WrittenStack) -> WrittenStack:
    """The echo with three children."""
    written.become(with_keys(), echo=1, **{"echo-child": REPLICAS})
    eventually(lambda: answers(written) == {"Echo: hi"}, "it answers")
    return written


def with_keys(**keys: str) -> str:
    """The application with these keys in the child's block."""
    reached = {"grpc_services": "[services.echo.app.EchoChild]"}  # so that HAProxy routes to it, too
    words = "".join(f"{key}: {value}, " for key, value in (reached | keys).items())
    head, child, tail = ECHO.partition("  echo-child:\n")
    tail = tail.replace("replicas: 1", f"replicas: {REPLICAS}")
    return head + child + tail.replace("x-serve: {", f"x-serve: {{{words}")


def config(stack: Stack) -> Any:
    return stack.service("echo-child")["user_config"]


def answers(stack: Stack) -> set[str]:
    """What the children say, each asked several times."""
    return {stack.get("/echo?message=hi").json["response"] for _ in range(30)}


def test_running_replicas_take_it_over_and_no_request_notices(echo: WrittenStack) -> None:
    before, worker = echo.replica_ids(), echo.haproxy_worker()
    with Load([echo.url("/echo?message=hi")], connections=16) as load:
        echo.write(with_keys(user_config="{greeting: Ahoy}"))
        eventually(lambda: echo.messages("user_config_applied"), "it has come everywhere")
        assert answers(echo) == {"Ahoy: hi"}
        [changed] = echo.messages("user_config")
        assert changed.endswith('greeting: nothing -> "Ahoy"; no restart')
        [applied] = echo.messages("user_config_applied")
        assert applied.endswith(f"is in force in {REPLICAS} of {REPLICAS} replicas")

        echo.write(with_keys(user_config="{greeting: 7}"))
        eventually(lambda: len(echo.messages("user_config_refused")) == REPLICAS, "all refuse it")
        assert answers(echo) == {"Ahoy: hi"}, "the former one stays in force"
        row = eventually(lambda: refused(echo), "the status says so")
        assert "EchoChild.reconfigure raised TypeError: unsupported operand" in row["message"]
        eventually(lambda: "no restart" in echo.plan_text(), "the plan says that they are not replaced")

        echo.container("controller").kill()
        echo.write(with_keys(user_config="{greeting: Moin}"))
        echo.container("controller").start()
        eventually(lambda: answers(echo) == {"Moin: hi"}, "the next controller continues the work", within_s=120)
        eventually(lambda: echo.service("echo-child")["state"] == "HEALTHY", "all is well")
    load.assert_no_failure()
    assert echo.replica_ids() == before, "the same containers"
    assert echo.haproxy_worker() == worker, "not one reload"
    assert config(echo)["value"] == {"greeting": "Moin"}

    echo.scale("echo-child", REPLICAS + 1)
    assert answers(echo) == {"Moin: hi"}, "the new one began with it"


def refused(stack: Stack) -> Any:
    """The children's row once it says that all of them refuse what is written."""
    row = stack.service("echo-child")
    return row if (row["state"], row["ready"]) == ("DEPLOY_FAILED", REPLICAS) else None


def calls(stack: Stack) -> dict[str, float]:
    """How many calls each child has had so far, by its own count."""
    found = {}
    for name, container in stack.replicas("echo-child").items():
        page = request(f"http://{address_of(container)}:9100/metrics").body.decode()
        lines = [line for line in page.splitlines() if line.startswith("pierhead_requests_total{") and "/echo" in line]
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
    return len(stack.messages("write_routing")) > before


@pytest.mark.long
def test_callers_go_by_another_router_and_no_request_notices(echo: WrittenStack) -> None:
    before = echo.replica_ids()
    assert spread(echo, "a")[0] < 30, "each request by itself"
    with Load([echo.url("/echo?message=hi")], connections=16) as load:
        for policy in ("round_robin", "least_ongoing", "consistent_hash"):
            so_far = len(echo.messages("write_routing"))
            echo.write(with_keys(router=f"{{policy: {policy}}}"))
            eventually(partial(wrote, echo, so_far), "HAProxy has it, and callers got it in the same tick")
    load.assert_no_failure()
    eventually(lambda: spread(echo, "a") == [30, 0, 0], "all of a session at one replica")
    assert spread(echo, "a") == [30, 0, 0]
    echo.write(with_keys(router="{policy: round_robin}"))
    eventually(lambda: spread(echo, "a") == [10, 10, 10], "in turn")
    assert echo.replica_ids() == before, "the same containers, of callers and called"
