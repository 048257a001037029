"""Several ranks of one vLLM, as processes on the CPU: they answer as one rank does, and all of them work."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from pierhead.llm.v1.llm_pb2 import LLMRequest
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub
from pierhead.llm_config import LLMConfig, ModelLoading
from prometheus_client.parser import text_string_to_metric_families

from tests.environments import vllm
from tests.harness.stack import free_ports, request
from tests.harness.vllm_processes import ANSWER_S, PLAIN, STARTED_WITHIN_S, is_ready, llm_server, make_random_models
from tests.harness.waiting import seconds_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(STARTED_WITHIN_S + 60),
    pytest.mark.skipif(not vllm.VLLM.is_made(), reason="no vLLM here; python -m tests.environments.vllm makes it"),
]

RANKS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor_parallel_size": 2},
    "data parallel": {"engine_kwargs": {"data_parallel_size": 2}},
}
PROMPT = "The capital of France is"
MANY = 8


class Served:
    """One LLM server."""

    def __init__(self, lane: int, admin: int) -> None:
        self._lane, self._admin = lane, admin

    def asked(self, times: int) -> list[Any]:
        """The answers to the same completion, asked so many times at once."""
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1}
        one = LLMRequest(body=json.dumps(body).encode(), path="/v1/completions")
        with grpc.insecure_channel(f"127.0.0.1:{self._lane}") as channel:
            stub = LLMServerStub(channel)
            calls = [stub.Completions(one, timeout=ANSWER_S) for _ in range(times)]
            return [json.loads(b"".join(reply.data for reply in call)) for call in calls]

    def finished(self) -> dict[str, float]:
        """By vLLM's engine: how many requests it has finished."""
        page = request(f"http://127.0.0.1:{self._admin}/metrics").body.decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "vllm:request_success_total":
                    found[sample.labels["engine"]] = found.get(sample.labels["engine"], 0.0) + sample.value
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_random_models(directory, "text")
    return directory / "text"


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts a server, by a name, with fields of LLMConfig."""
    with contextlib.ExitStack() as stack:

        def start(name: str, **fields: Any) -> Served:
            lane, admin = free_ports(2)
            kwargs = PLAIN | fields.pop("engine_kwargs", {})
            loading = ModelLoading(model_id="text", model_source=str(model))
            config = LLMConfig(model_loading=loading, engine_kwargs=kwargs, **fields)
            # vLLM binds ranks to NUMA nodes of their own, of which this machine need not have two.
            server = llm_server(config, tmp_path / f"{name}.log", lane, admin, VLLM_CPU_OMP_THREADS_BIND="nobind")
            running = stack.enter_context(server)
            took_s = seconds_until(lambda: is_ready(running, admin), name, STARTED_WITHIN_S)
            print(f"  {name}: ready after {took_s:.0f} s")
            return Served(lane, admin)

        yield start


@pytest.mark.parametrize("kind", RANKS)
def test_ranks_answer_as_one_rank_does(serve: Callable[..., Served], kind: str) -> None:
    [wanted] = serve("one rank").asked(1)
    several = serve(kind, **RANKS[kind])
    for answer in several.asked(MANY):
        choice, expected = answer["choices"][0], wanted["choices"][0]
        assert choice["text"] == expected["text"]
        pairs = zip(choice["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"], strict=True)
        assert all(math.isclose(one, other, abs_tol=1e-3) for one, other in pairs)
    engines = several.finished()
    print(f"  {kind}: requests finished by engine: {engines}")
    assert len([count for count in engines.values() if count]) == (2 if kind == "data parallel" else 1)
