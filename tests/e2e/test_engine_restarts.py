"""The Docker Engine is restarted under load: with live-restore nobody notices, without it all comes back by itself.

The engine is one of the test's own (tests/harness/own_engine.py): the machine's own runs other people's containers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.harness.load import Load
from tests.harness.own_engine import OwnEngine, missing
from tests.harness.stack import ROOT, Stack, address_of, request
from tests.harness.waiting import eventually, seconds_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(900)]

ECHO = "/echo?message=x"
REPLICAS = {"echo": 2, "echo-child": 2}
OWN = ("haproxy", "controller", "prometheus")
AWAY = "the Docker Engine does not answer"
CONNECTIONS = 16


@pytest.fixture(scope="module")
def engine() -> Iterator[OwnEngine]:
    if why := missing():
        pytest.skip(f"no Docker Engine that may be restarted: {why}")
    with OwnEngine().running() as engine, engine.network():
        yield engine


@pytest.fixture(scope="module")
def stack(engine: OwnEngine) -> Iterator[Stack]:
    stack = Stack("pierhead-test-engine", ["compose/apps/echo.yaml"], {"DOCKER_HOST": engine.host})
    engine.load(stack.compose("config", "--images").stdout.split())
    try:
        stack.up()
        eventually(lambda: stack.get(ECHO).status == 200, "echo answers", within_s=120)
        for service, replicas in REPLICAS.items():
            stack.scale(service, replicas)
        yield stack
    finally:
        evidence = ROOT / "test-evidence" / stack.project
        stack.save_evidence(evidence)
        (evidence / "dockerd.log").write_bytes(engine.log.read_bytes())
        stack.docker.close()


def lives(stack: Stack) -> dict[str, tuple[str, int]]:
    """Container and process of everything but the controller: the same before and after = it lived on."""
    containers = [stack.container(name) for name in OWN if name != "controller"] + list(stack.replicas().values())
    return {str(one.name): (str(one.id), int(one.attrs["State"]["Pid"])) for one in containers}


def sees_the_engine(stack: Stack) -> bool:
    notices = stack.api("/api/v1/services").json["notices"]
    return not any(AWAY in notice for notice in notices) and stack.plan_text() == "nothing to do"


def test_with_live_restore_no_request_is_lost(engine: OwnEngine, stack: Stack) -> None:
    engine.set_live_restore(True)
    before, controller = lives(stack), stack.container("controller").id
    # Not by the published ports, which are the engine's: it refuses new connections for a second when it starts.
    edge, api = address_of(stack.container("haproxy")), address_of(stack.container("controller"))
    with Load([f"http://{edge}:8000{ECHO}"], connections=CONNECTIONS) as load:
        engine.stop()
        eventually(
            lambda: any(AWAY in one for one in request(f"http://{api}:8100/api/v1/services").json["notices"]),
            "the controller says that the engine is away",
        )
        engine.start()
        back = seconds_until(lambda: sees_the_engine(stack), "the controller has the engine again", within_s=90)
        assert lives(stack) == before, "nothing was restarted"
        stack.scale("echo", 3)
        stack.scale("echo", 2)
    print(f"\nwith live-restore: {load.result}; the controller had it back after {back:.1f} s")
    load.assert_no_failure()
    assert stack.container("controller").id == controller


def test_published_ports_stay_open_while_the_engine_is_down(engine: OwnEngine, stack: Stack) -> None:
    """They are rules in the kernel. The engine writes them again when it starts: then they refuse for some 0.2 s."""
    engine.set_live_restore(True)
    before = lives(stack)
    # Each replica has found its callee before: the engine, which will be away, resolves the names of its networks.
    for _ in range(50):
        assert stack.get(ECHO).status == 200
    with Load([stack.url(ECHO)], connections=CONNECTIONS, reuse=False) as load:
        engine.stop("KILL")
        for _ in range(200):
            assert stack.get(ECHO).status == 200
        starting = time.time()
        engine.start()
        eventually(lambda: sees_the_engine(stack), "the controller has the engine again", within_s=90)
    print(f"\na crash of the engine, a new connection for each request: {load.result}")
    assert [failure for failure in load.result.failures if failure.at < starting] == []
    assert load.result.kinds() <= {"ConnectionRefusedError"}, load.result.failures
    assert lives(stack) == before, "nothing was restarted"


def test_without_it_everything_comes_back_by_itself(engine: OwnEngine, stack: Stack) -> None:
    engine.set_live_restore(False)
    own, replicas = {name: stack.container(name).id for name in OWN}, stack.replica_ids()
    with Load([stack.url(ECHO)], connections=CONNECTIONS) as load:
        engine.stop()
        engine.start()
        took = seconds_until(lambda: stack.get(ECHO).status == 200, "requests succeed again", within_s=120)
        stack.wait_settled(**REPLICAS)
        eventually(lambda: sees_the_engine(stack), "the controller's plan is empty")
    print(f"\nwithout live-restore: {load.result}; the first answer {took:.1f} s after the engine's")
    assert {name: stack.container(name).id for name in OWN} == own, "by their restart policy"
    assert not stack.replica_ids() & replicas, "by the controller"
    assert {stack.service(name)["state"] for name in REPLICAS} == {"HEALTHY"}
    with Load([stack.url(ECHO)], connections=CONNECTIONS) as after:
        stack.scale("echo", 3)
        stack.scale("echo", 2)
    after.assert_no_failure()
