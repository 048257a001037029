"""Three services take turns on one GPU, which is invented: the containers, the drains and HAProxy are real."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.harness.fake_gpus import CDI_KIND, fake_gpus, write_gpus
from tests.harness.load import Load
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

NAMES = ("small", "coder", "large")


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    with fake_gpus():
        write_gpus(range(1))
        stack = Stack("pierhead-test-turns", ("tests/e2e/apps/turns.yaml",), {"PIERHEAD_GPU_CDI_KIND": CDI_KIND})
        with stack.running():
            routes = {f"/{name}" for name in NAMES}
            eventually(lambda: set(stack.get("/-/routes").json) >= routes, "the routes are there")
            yield stack


def turns(stack: Stack) -> list[str]:
    """Who gave way to whom, one sentence each."""
    return [message for message in stack.messages("autoscale") if "gave way to" in message]


def test_each_answers_in_its_turn_and_one_at_a_time_has_the_gpu(
    running: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES:
        answer = running.get(f"/{name}/faulty")
        assert (answer.status, answer.body.decode()) == (200, name)
        assert len(running.replicas()) == 1, "the others have none"
    eventually(lambda: "asleep until its next request" in running.service("coder")["message"], "the status tells it")
    assert [message.partition(":")[0] for message in turns(running)] == ["small", "coder"]
    with capsys.disabled():
        print("", *turns(running), running.pierhead("status").stdout, sep="\n")


@pytest.mark.long
def test_three_that_are_asked_without_end_alternate_and_no_request_fails(
    running: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    running.forget_events()
    urls = [running.url(f"/{name}/faulty") for name in NAMES]
    with Load(urls, connections=6, answer_s=300.0) as load:
        why = eventually(lambda: _waiting_words(running), "one of them says whose turn it waits for", every_s=0.1)
        for name in NAMES:
            eventually(partial(_has_had_two_turns, running, name), f"{name} has had two turns", within_s=240)
    load.assert_no_failure()
    with capsys.disabled():
        print("", why, *turns(running), f"longest wait {load.result.max_ms / 1000:.1f} s", sep="\n")


def _has_had_two_turns(stack: Stack, name: str) -> bool:
    return stack.gave_way(name) >= 2


def _waiting_words(stack: Stack) -> str:
    messages = [str(stack.service(name)["message"]) for name in NAMES]
    return next((message for message in messages if "gives way in" in message), "")


def test_all_give_way_to_one_without_the_word_and_it_to_none(running: Stack) -> None:
    assert running.get("/small/faulty").status == 200
    running.scale("pinned", 1)
    assert running.get("/pinned/faulty").status == 200
    running.scale("pinned", 0)
    assert running.get("/small/faulty").status == 200, "the GPU is free again"
