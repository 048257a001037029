"""Every panel of the LLM page against a running stack with the mock engine: each query must find data.

What only vLLM tells is looked up in its own page: tests/unit/dashboards, test_llm_prefill.py.
"""

from __future__ import annotations

import pytest

from dashboards import build_llm
from tests.harness.prometheus import Prometheus, queries_of, traffic
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT, Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(400)]

LLM = (ROOT / "tests" / "e2e" / "apps" / "llm.yaml").read_text()
MODEL = "steady"


def ask(stack: Stack, *, stream: bool, model: str = MODEL) -> int:
    messages = [{"role": "user", "content": "Tell me of the sea. " * 16}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "stream": stream}
    return stack.post("/v1/chat/completions", body).status


def test_every_panel_has_data_and_series_are_their_replicas(written: WrittenStack) -> None:
    asleep = {"llm-stalling": 0, "llm-broken": 0, "llm-absent": 0, "llm-asleep": 0}
    written.become(LLM, llm=3, **{"llm-gateway": 1}, **asleep)
    eventually(lambda: ask(written, stream=False) == 200, "the model answers", within_s=120)

    def ask_in_every_way() -> None:
        ask(written, stream=True)
        ask(written, stream=False)
        ask(written, stream=False, model="none")

    prometheus = Prometheus(written)
    with traffic(ask_in_every_way):
        prometheus.wait_for_data(queries_of(build_llm.SECTIONS))
        expr = "mock:generation_tokens_total"
        found = eventually(lambda: prometheus.labels(expr), f"data for {expr}")
    assert {labels["replica"] for labels in found} <= set(written.replicas("llm"))
    assert {labels["model_name"] for labels in found} == {MODEL}
