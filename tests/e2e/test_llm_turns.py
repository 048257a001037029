"""Three models with a real engine take turns on one GPU, which is invented, and all of them are asked without end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import pytest
from openai import OpenAI, OpenAIError

from tests.environments.llama_cpp import LLAMA_CPP
from tests.harness.fake_gpus import CDI_KIND, fake_gpus, write_gpus
from tests.harness.haproxy_container import docker
from tests.harness.stack import ROOT, Stack
from tests.harness.waiting import eventually

LOAD_S = float(os.environ.get("PIERHEAD_TEST_TURNS_S", "60"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.alone,
    pytest.mark.stack,
    pytest.mark.timeout(LOAD_S + 600),
    pytest.mark.skipif(
        not LLAMA_CPP.is_made(), reason="no llama.cpp here; python -m tests.environments.llama_cpp makes it"
    ),
]

CONTAINER = ROOT / "tests" / "harness" / "llama_cpp_container"
NAMES = ("small", "coder", "large")
ANSWER_S = 300.0
TURN_S = 30.0
"""More than a turn's start, its stay (5 s), its longest request and its stop take on two cores."""


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    tag = os.environ.get("PIERHEAD_TAG", "latest")
    options = ("--network", "host", "--label", "pierhead.test=llama-cpp", "-t", f"pierhead-test/llama-cpp:{tag}")
    docker("build", *options, "--build-arg", f"BASE=pierhead/llm-none:{tag}", str(CONTAINER))
    with fake_gpus():
        write_gpus(range(1))
        stack = Stack(
            "pierhead-test-llm-turns", ("tests/e2e/apps/llm_turns.yaml",), {"PIERHEAD_GPU_CDI_KIND": CDI_KIND}
        )
        with stack.running():
            stack.wait_settled(**{"llm-gateway": 1})
            eventually(lambda: "/" in stack.get("/-/routes").json, "the route is there")
            yield stack


@dataclass
class Asked:
    """What a client of one model saw: seconds to the first token, and what failed."""

    waits_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def ask(url: str, model: str, stop: threading.Event, seen: Asked) -> None:
    """One stream after the other."""
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S) as client:
        while not stop.is_set():
            began, first_s, reason = time.monotonic(), 0.0, None
            try:
                for part in client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "Count."}], max_tokens=16, stream=True
                ):
                    if part.choices:
                        first_s = first_s or time.monotonic() - began
                        reason = part.choices[0].finish_reason
            except OpenAIError as error:
                seen.failures.append(repr(error))
                stop.wait(1)
            else:
                seen.waits_s.append(first_s)
                if reason is None:
                    seen.failures.append(f"no end of the answer that began after {first_s:.1f} s")


@contextmanager
def all_asked(stack: Stack) -> Iterator[dict[str, Asked]]:
    """Two clients for each model, until the block ends."""
    stop, seen = threading.Event(), {name: Asked() for name in NAMES}
    arguments = [(stack.url("/v1"), name, stop, seen[name]) for name in NAMES for _ in range(2)]
    clients = [threading.Thread(target=ask, args=each) for each in arguments]
    for client in clients:
        client.start()
    try:
        yield seen
    finally:
        stop.set()
        for client in clients:
            client.join()


def test_all_have_turns_and_no_request_fails(running: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """PIERHEAD_TEST_TURNS_S: for how long."""
    words: dict[str, str] = {}
    with all_asked(running) as seen:
        until = time.monotonic() + LOAD_S
        while time.monotonic() < until:
            for command in (("plan",), ("why", "large"), ("status",)):
                printed = running.pierhead(*command).stdout
                if "way to" in printed or "gives way in" in printed:
                    words.setdefault(command[0], printed)
    with capsys.disabled():
        print("", *(f"$ pierhead {name}\n{text}" for name, text in words.items()), sep="\n")
        for name, asked in seen.items():
            waits = sorted(asked.waits_s)
            print(
                f"{name}: gave way {running.gave_way(name)} times; {len(waits)} answers, {len(asked.failures)} failed; "
                f"first token after {median(waits):.2f} s (median), {waits[-1]:.1f} s (longest)"
            )
    assert {name: asked.failures for name, asked in seen.items()} == {name: [] for name in NAMES}
    assert set(words) == {"plan", "why", "status"}, "each says who gives way to whom"
    for name, asked in seen.items():
        assert running.gave_way(name) >= LOAD_S / (len(NAMES) * TURN_S) - 1
        assert max(asked.waits_s) < len(NAMES) * TURN_S, "a turn of each other one, and its own start"
