"""The failure table, line by line, on the real stack under load: what happens, and what clients may see of it.

Failures are judged by their time and their number. How many seconds it takes depends on the machine:
`python -m tests.bench.recovery` measures that.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from docker.models.containers import Container

from tests.harness.load import PAUSE_S, Load
from tests.harness.stack import Stack, address_of, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

ECHO = "/echo?message=x"
RECSYS = "/recsys/?user_id=1"
CONNECTIONS = 50


def load_on(stack: Stack, *paths: str, connections: int = CONNECTIONS) -> Load:
    return Load([stack.url(path) for path in paths or (RECSYS, ECHO)], connections=connections)


def test_scaling_up_and_down_loses_nothing_and_reloads_nothing(stack: Stack) -> None:
    worker = stack.haproxy_worker()
    with load_on(stack) as load:
        for service, replicas in (("ranker", 3), ("ranker", 1), ("recsys", 2), ("echo", 3), ("echo", 1)):
            stack.scale(service, replicas)
            assert stack.is_settled(service, replicas)
    load.assert_no_failure()
    assert stack.haproxy_worker() == worker


def test_every_replica_takes_its_share(stack: Stack) -> None:
    stack.scale("echo-child", 3)
    with load_on(stack, ECHO, connections=8):
        eventually(
            lambda: all(replica["ongoing"] is not None for replica in stack.service("echo-child")["replicas"]),
            "every replica reports",
        )
        eventually(lambda: _calls_by_replica(stack, "echo-child", 3), "three replicas have had calls")


def _calls_by_replica(stack: Stack, service: str, count: int) -> bool:
    """Whether that many replicas of the service have answered calls, by their own counters."""
    return sum(_requests_total(container) > 0 for container in stack.replicas(service).values()) == count


def _requests_total(container: Container) -> float:
    text = request(f"http://{address_of(container)}:9100/metrics").body.decode()
    counters = [line for line in text.splitlines() if line.startswith("pierhead_requests_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counters)


@pytest.mark.long
def test_controller_restarted_by_docker(stack: Stack) -> None:
    replicas, worker = stack.replica_ids(), stack.haproxy_worker()
    with load_on(stack) as load:
        stack.container("controller").restart(timeout=20)
        stack.settle(ranker=2)
    load.assert_no_failure()
    assert stack.replica_ids() == replicas
    assert stack.haproxy_worker() == worker


def test_controller_process_killed(stack: Stack) -> None:
    replicas, worker = stack.replica_ids(), stack.haproxy_worker()
    controller = stack.container("controller")
    started_at = controller.attrs["State"]["StartedAt"]
    with load_on(stack) as load:
        stack.kill_process(controller)
        eventually(lambda: _runs_anew(stack, "controller", started_at), "Docker starts it again")
        stack.settle(ranker=2)
    load.assert_no_failure()
    assert stack.replica_ids() == replicas
    assert stack.haproxy_worker() == worker


def _runs_anew(stack: Stack, compose_service: str, before: str) -> bool:
    """Whether a container of the stack runs and was started at another time than `before`."""
    state = stack.container(compose_service).attrs["State"]
    return bool(state["Running"]) and state["StartedAt"] != before


def test_controller_killed_for_good_until_up_starts_it(stack: Stack) -> None:
    stack.scale("echo", 2)
    replicas, worker = stack.replica_ids(), stack.haproxy_worker()
    with load_on(stack) as load:
        stack.container("controller").kill()
        eventually(lambda: stack.container("controller").status == "exited", "the controller is dead")
        asked = stack.pierhead("status")
        assert asked.returncode != 0
        stack.up()
        stack.settle(echo=2)
    load.assert_no_failure()
    assert stack.replica_ids() == replicas, "the scale that was asked for survives its controller"
    assert stack.haproxy_worker() == worker


def test_haproxy_killed(stack: Stack) -> None:
    haproxy, replicas = stack.container("haproxy"), stack.replica_ids()
    started_at = haproxy.attrs["State"]["StartedAt"]
    with load_on(stack) as load:
        killed_at = stack.kill_process(haproxy)
        eventually(lambda: _runs_anew(stack, "haproxy", started_at), "Docker starts it again", every_s=0.01)
        eventually(lambda: _answers(stack, ECHO, RECSYS), "every server is back", every_s=0.01)
        back_at = time.time()
        eventually(lambda: stack.plan_text() == "nothing to do", "the controller's plan is empty")
    failed = f"killed at {killed_at:.1f}, back at {back_at:.1f}: {load.result}\n{load.result.counts}"
    assert load.result.last_failed_begun_at <= back_at, failed
    # Of each connection: what it had begun, then one after each pause, and the one that was on its way at the end.
    assert load.result.failed <= CONNECTIONS * (2 + (back_at - killed_at) / PAUSE_S), failed
    assert stack.replica_ids() == replicas
    assert stack.get("/-/healthz").status == 200


def test_haproxy_that_hangs_is_restarted(stack: Stack) -> None:
    started_at, replicas = stack.container("haproxy").attrs["State"]["StartedAt"], stack.replica_ids()
    with load_on(stack) as load:
        hung_at = stack.hang_haproxy()
        eventually(lambda: _runs_anew(stack, "haproxy", started_at), "the controller starts it again", every_s=0.01)
        restarted_at = time.time()
        eventually(lambda: _answers(stack, ECHO, RECSYS), "every server is back", every_s=0.01)
        back_at = time.time()
        eventually(lambda: stack.plan_text() == "nothing to do", "the controller's plan is empty")
    assert load.result.last_failed_begun_at <= back_at, f"back at {back_at:.1f}: {load.result.counts}"
    assert stack.replica_ids() == replicas
    [told] = stack.messages("restart_router")
    assert "HAProxy hangs: neither its runtime API nor its HTTP port has answered" in told
    assert restarted_at - hung_at >= 10.0, "not before PIERHEAD_HAPROXY_SILENCE_S"


def _answers(stack: Stack, *paths: str) -> bool:
    return all(stack.get(path).status == 200 for path in paths)


@pytest.mark.parametrize(
    ("service", "replicas", "paths"), [("ranker", 2, (RECSYS, ECHO)), ("echo", 2, (ECHO,))], ids=["called", "ingress"]
)
def test_replica_killed_under_load(stack: Stack, service: str, replicas: int, paths: tuple[str, ...]) -> None:
    stack.scale(service, replicas)
    victim = next(iter(stack.replicas(service).values()))
    with load_on(stack, *paths) as load:
        stack.kill_process(victim)
        eventually(lambda: failures(stack, service), "the failure is reported")
        told_at = time.time()
        eventually(lambda: victim.id not in stack.replica_ids(service), "the dead replica's container is gone")
        stack.wait_settled(**{service: replicas})
    assert load.result.last_failed_begun_at <= told_at, "out of rotation"
    assert load.result.failed <= CONNECTIONS, "only what it had begun"
    assert all(paths[0] in count.url for count in load.result.counts), "others are untouched"
    assert [event["target"] for event in failures(stack, service)] == [victim.name]


def failures(stack: Stack, service: str) -> list[Any]:
    """The events that tell of a service's failed replicas."""
    return [event for event in stack.events() if (event["kind"], event["service"]) == ("replica_failed", service)]


def test_replica_that_hangs_is_replaced(stack: Stack) -> None:
    stack.scale("echo-child", 2)
    victim = next(iter(stack.replicas("echo-child").values()))
    with load_on(stack, ECHO, connections=10) as load:
        stack.kill_process(victim, "STOP")
        eventually(lambda: victim.id not in stack.replica_ids("echo-child"), "the hanging replica is gone", 120)
        gone_at = time.time()
        stack.wait_settled(**{"echo-child": 2})
    assert load.result.last_failed_begun_at <= gone_at, "no caller sends it calls any more"
    assert load.result.failed <= 10, "only what it had begun"
    with load_on(stack, ECHO, connections=10) as after:
        eventually(lambda: stack.get(ECHO).status == 200, "it answers")
    after.assert_no_failure()


def test_replica_that_loses_its_network_is_replaced(stack: Stack) -> None:
    stack.scale("echo", 2)
    victim = next(iter(stack.replicas("echo").values()))
    network = stack.docker.networks.get(f"{stack.project}_default")
    with load_on(stack, ECHO, connections=10) as load:
        network.disconnect(victim, force=True)
        stack.scale("ranker", 3)  # the engine's events have the controller read it while the address is gone
        eventually(lambda: failures(stack, "echo"), "the failure is reported")
        told_at = time.time()
        eventually(lambda: victim.id not in stack.replica_ids("echo"), "the replica without a network is gone")
        stack.wait_settled(echo=2)
    assert load.result.last_failed_begun_at <= told_at, "out of rotation"
    assert load.result.failed <= 10, "only what it had begun"
    said = [event["message"] for event in stack.events() if event["target"] == victim.name]
    assert any("it has no network address" in message for message in said), said
    assert not any("another one has its name" in message for message in said), said
