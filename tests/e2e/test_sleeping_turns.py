"""Services that can sleep take turns on one GPU, which is invented: each stays in its container between its turns."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.harness.fake_gpus import CDI_KIND, fake_gpus, fake_smi
from tests.harness.load import Load
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.stack, pytest.mark.timeout(600)]

NAMES = ("small", "coder")
TOTAL_MIB = 512
"""Of the GPU: the machine must have as much memory free for each that sleeps."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with fake_gpus():
        fake_smi(tmp_path_factory.mktemp("smi"), 1, TOTAL_MIB)
        files = ("tests/e2e/apps/turns.yaml", "tests/e2e/apps/turns_asleep.yaml")
        stack = Stack("pierhead-test-sleep", files, {"PIERHEAD_GPU_CDI_KIND": CDI_KIND})
        with stack.running():
            eventually(lambda: set(stack.get("/-/routes").json) >= {f"/{name}" for name in NAMES}, "the routes")
            yield stack


def containers(stack: Stack) -> dict[str, str]:
    """The container of each service that has one."""
    return {name: str(container.id) for name in NAMES for container in stack.replicas(name).values()}


def took_s(stack: Stack, name: str) -> float:
    began = time.monotonic()
    answer = stack.get(f"/{name}/faulty")
    assert (answer.status, answer.body.decode()) == (200, name)
    return time.monotonic() - began


def test_a_service_answers_in_its_turns_from_one_container(running: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    cold = {name: took_s(running, name) for name in NAMES}
    before = containers(running)
    assert before.keys() == set(NAMES), "small stays when it has given way"
    eventually(lambda: "ASLEEP" in running.pierhead("status").stdout, "the status tells that it sleeps")
    status = running.pierhead("status").stdout
    warm = {name: took_s(running, name) for name in NAMES}
    assert containers(running) == before
    with capsys.disabled():
        print("", f"first turns {cold}, next turns {warm}", status, *running.messages("put_to_sleep"), sep="\n")


def test_a_row_of_turns_loses_no_request(running: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    before = containers(running)
    with Load([running.url(f"/{name}/faulty") for name in NAMES], connections=4, answer_s=300.0) as load:
        eventually(lambda: woken(running) >= 4, "four turns more", within_s=240)
    load.assert_no_failure()
    assert containers(running) == before
    with capsys.disabled():
        print("", load.result, f"woken {woken(running)} times", sep="\n")


def woken(stack: Stack) -> int:
    """How often a replica was told to wake up."""
    return sum(event["times"] for event in stack.events() if event["kind"] == "wake_replica")


def test_one_that_is_switched_off_leaves(running: Stack) -> None:
    for name in NAMES:
        running.scale(name, 0)
    eventually(lambda: not containers(running), "none is left")
