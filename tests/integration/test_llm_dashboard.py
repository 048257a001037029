"""Every panel of the LLM page against a running stack with the mock engine: each query must find data.

What only vLLM tells is looked up in its own page: tests/unit/dashboards, test_llm_vllm.py.
"""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from dashboards import build_llm
from tests.harness.prometheus import Prometheus, queries_of
from tests.harness.stack import ROOT, Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

APP = ROOT / "tests" / "e2e" / "apps" / "llm.yaml"
COPY = ROOT / ".state" / "llm-dashboard.yaml"
"""Paths in it are relative to a directory of the first level."""
MODEL = "steady"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    COPY.parent.mkdir(exist_ok=True)
    shutil.copy(APP, COPY)
    try:
        with Stack("pierhead-test-llm-page", [str(COPY.relative_to(ROOT))]).running() as running:
            eventually(lambda: _ask(running, stream=False) == 200, "the model answers", within_s=120)
            yield running
    finally:
        COPY.unlink()


def _ask(stack: Stack, *, stream: bool, model: str = MODEL) -> int:
    messages = [{"role": "user", "content": "Tell me of the sea. " * 16}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "stream": stream}
    url, head = stack.url("/v1/chat/completions"), {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except OSError as error:
        return int(getattr(error, "code", 0))


@pytest.fixture(scope="module")
def _traffic(stack: Stack) -> Iterator[None]:
    """Streams, whole answers and a model that is not there, for as long as the tests look."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.1):
            _ask(stack, stream=True)
            _ask(stack, stream=False)
            _ask(stack, stream=False, model="none")

    asking = threading.Thread(target=ask)
    asking.start()
    yield
    over.set()
    asking.join()


@pytest.fixture(scope="module")
def prometheus(stack: Stack) -> Prometheus:
    return Prometheus(stack)


@pytest.mark.usefixtures("_traffic")
@pytest.mark.parametrize("expr", queries_of(build_llm.SECTIONS))
def test_a_panel_has_data(prometheus: Prometheus, expr: str) -> None:
    eventually(lambda: prometheus.numbers(expr), f"data for {expr}", within_s=120)


@pytest.mark.usefixtures("_traffic")
def test_engines_series_are_their_replicas(stack: Stack, prometheus: Prometheus) -> None:
    expr = "mock:generation_tokens_total"
    found = eventually(lambda: prometheus.labels(expr), f"data for {expr}")
    assert {labels["replica"] for labels in found} <= set(stack.replicas("llm"))
    assert {labels["model_name"] for labels in found} == {MODEL}
