"""The attacks of tests/faults/attacks.py on a whole stack, one by one and all at once, while honest clients ask.

Honest clients ask 20 times a second, over HTTP and over gRPC, and none of them may fail. `-s` prints the table of their
p99 during each attack; on a machine with as few processors as attackers it says more about the machine.
"""

from __future__ import annotations

import time

import pytest
import yaml
from docker.types import Ulimit

from tests.faults.attacks import ATTACKS, FILES
from tests.harness.load import Load, LoadResult
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT, address_of
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(900)]

ECHO = (ROOT / "compose/apps/echo-proto.yaml").read_text()
MODELS = (ROOT / "tests/e2e/apps/llm.yaml").read_text()
SECONDS = 10.0


def _services() -> str:
    """The echo with HTTP, gRPC and WebSockets, and a language model without a model."""
    echo, models = (yaml.safe_load(text)["services"] for text in (ECHO, MODELS))
    gateway = models["llm-gateway"]
    gateway |= {"depends_on": ["llm"], "environment": {"PIERHEAD_LLM_MODELS": '{"steady": "llm"}'}}
    model = models["llm"]
    model["x-serve"] |= {"replicas": 1}
    return str(yaml.safe_dump({"services": {**echo, "llm-gateway": gateway, "llm": model}}))


def _during(stack: WrittenStack, name: str) -> LoadResult:
    """What honest clients saw while an attack ran; "" = none did."""
    load = Load([stack.url("/echo?message=hi")], connections=4, pause_s=0.2, limit_s=SECONDS + 60, answer_s=30.0)
    with load:
        if name:
            print(f"{name}: {_attack(stack, name)}")
        else:
            began = time.monotonic()
            eventually(lambda: time.monotonic() - began > SECONDS, "the time is over", SECONDS + 5)
    return load.result


def _attack(stack: WrittenStack, name: str) -> str:
    """In a container, whose address is not that of the honest clients. How far it came."""
    [replica] = stack.replicas("echo").values()
    words = ["python", "-m", "tests.faults.attacks", name, "--host", address_of(stack.container("haproxy"))]
    said: bytes = stack.docker.containers.run(
        replica.attrs["Image"],
        [*words, "--http", "8000", "--grpc", "9000", "--seconds", str(SECONDS)],
        remove=True,
        labels={"pierhead.test": "attacks", "com.docker.compose.project": stack.project},
        network=f"{stack.project}_default",
        volumes={str(ROOT): {"bind": "/clone", "mode": "ro"}},
        working_dir="/clone",
        environment={"PYTHONPATH": "/clone"},
        ulimits=[Ulimit(name="nofile", soft=FILES, hard=FILES)],
    )
    return said.decode().strip()


@pytest.fixture
def stack(written: WrittenStack) -> WrittenStack:
    written.become(_services(), echo=1, llm=1, **{"echo-child": 1, "llm-gateway": 1})
    eventually(lambda: written.get("/echo?message=hi").status == 200, "it answers")
    return written


def test_no_attack_makes_an_honest_request_fail(stack: WrittenStack) -> None:
    worker = stack.haproxy_worker()
    table = {name or "nothing": _during(stack, name) for name in ("", *ATTACKS, "all")}
    usual = table["nothing"].p99_ms
    for name, seen in table.items():
        times = f"p99 {seen.p99_ms:7.1f} ms, {seen.p99_ms / usual:5.1f} x"
        print(f"{name:30} {seen.requests:5} requests, {seen.failed} failed, {times}")
    assert {name: seen.failed for name, seen in table.items() if seen.failed} == {}
    assert stack.haproxy_worker() == worker
    eventually(lambda: stack.is_settled("echo", 1) and stack.is_settled("llm", 1), "all is as before")
