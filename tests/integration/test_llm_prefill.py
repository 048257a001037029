"""Prefill and decode apart by vLLM's NixlConnector, with real vLLMs on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.environments import vllm
from tests.environments.vllm import MODELS
from tests.harness.stack import request
from tests.harness.vllm_processes import STARTED_WITHIN_S
from tests.harness.whole_way import CHAT_ENGINE, LONG, ONE_THREAD, TRANSFER, WholeWay, all_ready, whole_way
from tests.unit.dashboards.sources import VLLM_PAGE

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(STARTED_WITHIN_S + 60),
    pytest.mark.skipif(not vllm.VLLM.is_made(), reason="no vLLM here; python -m tests.environments.vllm makes it"),
]

NAMES = {
    "smollm2": "llm",
    "apart": {"service": "llm-decode", "prefill": "llm", "alias_of": "smollm2"},
}


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeWay]:
    engine = (f"{MODELS}/smollm2", CHAT_ENGINE | {"kv_transfer_config": TRANSFER})
    logs = tmp_path_factory.mktemp("logs")
    with (
        whole_way({"llm": engine, "llm-decode": engine}, NAMES, logs, **ONE_THREAD) as started,
        all_ready(*started) as ready,
    ):
        yield ready


def test_prefill_reads_and_decode_answers(way: WholeWay) -> None:
    whole = way.chat(LONG).choices[0].message.content
    before = way.numbers("llm-decode")
    answer = way.chat(LONG, model="apart")
    after = way.numbers("llm-decode")
    assert answer.choices[0].message.content == whole
    assert way.numbers("gateway")["pierhead_llm_prefill_total{done}"] == 1
    taken = after["vllm:external_prefix_cache_hits_total"] - before["vllm:external_prefix_cache_hits_total"]
    assert taken == answer.usage.prompt_tokens, "all of it"
    parts = way.chat(LONG, model="apart", stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole


BEYOND_THE_PAGE = (
    "cache_config_info gauge",
    "num_requests_kv_fetch_by_stage gauge",
    "tool_call_parser_invocations_created gauge",
    "tool_call_parser_invocations_total counter",
    "nixl_",
)
"""What an engine has that serves, with a connector and a parser of tool calls, and nothing asks for."""


def test_the_page_of_vllm_that_the_dashboard_is_checked_against_is_vllms(way: WholeWay) -> None:
    page = request(f"http://127.0.0.1:{way.admins['llm-decode']}/metrics").body.decode()
    beyond = tuple(f"# TYPE vllm:{name}" for name in BEYOND_THE_PAGE)
    lines = [line for line in page.splitlines() if line.startswith("# TYPE vllm:")]
    assert {line for line in lines if not line.startswith(beyond)} == {
        line for line in VLLM_PAGE.read_text().splitlines() if line.startswith("# TYPE")
    }
