"""A real vLLM in the containers of a stack: woken from zero replicas, and reading prompts for another container.

Its packages and its model are those of tests/environments/vllm.py, which are mounted: pierhead/llm-cpu has 4 GB.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from docker.models.containers import Container
from openai import OpenAI

from tests.environments.vllm import MODELS, VLLM
from tests.harness.haproxy_container import docker
from tests.harness.hub_server import HubRepository, hub_server
from tests.harness.stack import EVIDENCE, OURS, ROOT, Stack, address_of, request
from tests.harness.vllm_processes import ANSWER_S, ENDED_WITHIN_S, STARTED_WITHIN_S
from tests.harness.whole_way import LONG, ONE_THREAD, TRANSFER

pytestmark = [
    pytest.mark.long,
    pytest.mark.stack,
    pytest.mark.timeout(2 * STARTED_WITHIN_S + 600),
    pytest.mark.skipif(not VLLM.is_made(), reason="no vLLM here; python -m tests.environments.vllm makes it"),
]

IMAGE = f"pierhead-test/vllm:{OURS}"
BASE = f"pierhead/llm-none:{os.environ.get('PIERHEAD_TAG', 'latest')}"
READ_WITHIN = 5
"""Requests."""
ENGINE = "max_model_len: 2048, enforce_eager: true, dtype: float32, gpu_memory_utilization: 0.15"
APP = f"""\
x-vllm: &vllm
  image: {IMAGE}
  scale: 0
  environment: &environment {{VLLM_CPU_KVCACHE_SPACE: "1"}}
  shm_size: 1gb # vLLM's processes share tensors in it
  volumes:
    - {VLLM.directory}/lib/python3.11/site-packages:/opt/vllm/lib/python3.11/site-packages:ro
    - {MODELS}:/models:ro
    - llm-cache:/cache

services:
  llm-gateway:
    image: pierhead/llm-gateway:${{PIERHEAD_TAG:-latest}}
    depends_on: $CALLED
    scale: 0
    environment:
      PIERHEAD_LLM_MODELS: '$MODELS'
    x-serve: {{replicas: 1, route: /, request_timeout_s: {ANSWER_S:.0f}}}
$SERVICES
volumes:
  llm-cache:
"""
PREFILL_AND_DECODE = f"""
  llm: &reads
    <<: *vllm
    environment: {json.dumps({"VLLM_CPU_KVCACHE_SPACE": "1"} | ONE_THREAD)}
    x-serve:
      replicas: 1
      request_timeout_s: {ANSWER_S:.0f}
      llm:
        model_loading: {{model_id: smollm2, model_source: /models/smollm2}}
        engine_kwargs:
          <<: {{{ENGINE}}}
          kv_transfer_config: {json.dumps(TRANSFER | {"kv_load_failure_policy": "recompute"})}
  llm-decode: *reads
"""
ASLEEP = f"""
  llm:
    <<: *vllm
    environment: {{<<: *environment, HF_ENDPOINT: "http://hub:$PORT"}}
    extra_hosts: ["hub:host-gateway"]
    x-serve:
      request_timeout_s: {ANSWER_S:.0f}
      autoscale: {{min: 0, max: 1, look_back_period_s: 1, downscale_delay_s: 3}}
      llm:
        model_loading: {{model_id: smollm2, model_source: tests/smollm2}}
        engine_kwargs: {{{ENGINE}}}
"""


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    options = ("--network", "host", "--label", "pierhead.test=vllm", "--build-arg", f"BASE={BASE}")
    docker("build", *options, "-t", IMAGE, str(ROOT / "tests" / "harness" / "vllm_container"))


@contextlib.contextmanager
def running(name: str, services: str, models: str) -> Iterator[tuple[Stack, OpenAI]]:
    """A stack with these services and the gateway, and a client of it."""
    EVIDENCE.mkdir(exist_ok=True)
    file = EVIDENCE / f"{name}-{OURS}.yaml"
    called = json.dumps(re.findall("^  ([a-z-]+):", services, re.MULTILINE))
    file.write_text(APP.replace("$SERVICES", services).replace("$MODELS", models).replace("$CALLED", called))
    stack = Stack(name, [f"{EVIDENCE.name}/{file.name}"])
    with stack.running(), OpenAI(base_url=stack.url("/v1"), api_key="none", max_retries=0, timeout=ANSWER_S) as client:
        stack.wait_settled(**{"llm-gateway": 1})
        yield stack, client


def chat(client: OpenAI, model: str, number: int = 0) -> tuple[str | None, int]:
    """An answer, and the tokens of the prompt, which is another one from its beginning for each number."""
    messages: Any = [{"role": "user", "content": f"{number}. {LONG[0]['content']}"}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
    assert answer.usage is not None
    return answer.choices[0].message.content, answer.usage.prompt_tokens


def number(container: Container, metric: str, label: str = "") -> float:
    """The sum of a metric's samples, of those with the label, as a replica shows it."""
    lines = request(f"http://{address_of(container)}:9100/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric}{{") and label in line)


def test_a_container_reads_prompts_for_another_one() -> None:
    """By NIXL, which finds the first container by the address that its server told."""
    models = '{"smollm2": "llm", "apart": {"service": "llm-decode", "prefill": "llm", "alias_of": "smollm2"}}'
    with running("pierhead-test-nixl", PREFILL_AND_DECODE, models) as (stack, client):
        stack.wait_settled(STARTED_WITHIN_S, llm=1, **{"llm-decode": 1})
        [decode], [gateway] = (stack.replicas(name).values() for name in ("llm-decode", "llm-gateway"))
        asked = 0
        while not number(decode, "vllm:nixl_bytes_transferred_sum"):
            asked += 1
            assert asked <= READ_WITHIN, "vLLM waits 5 s for the other engine, whose cores others keep busy"
            before = number(decode, "vllm:external_prefix_cache_hits_total")
            whole, _ = chat(client, "smollm2", asked)
            apart, prompt_tokens = chat(client, "apart", asked)
            assert apart == whole, "read or computed once more"
            assert number(gateway, "pierhead_llm_prefill_total", 'outcome="done"') == asked
        assert number(decode, "vllm:external_prefix_cache_hits_total") - before == prompt_tokens, "all of it"


def test_a_model_at_zero_replicas_answers_from_the_weights_of_its_first_start() -> None:
    """What a first request waits for is printed: with the weights to be fetched, and with those in the volume."""
    repository = HubRepository()
    repository.commit({file.name: file.read_bytes() for file in (MODELS / "smollm2").iterdir()})
    with hub_server("0.0.0.0") as hub:  # which containers reach
        port = hub.url.rpartition(":")[2]
        hub.url = f"http://hub:{port}"
        hub.repositories["tests/smollm2"] = repository
        services = ASLEEP.replace("$PORT", port)
        with running("pierhead-test-llm-asleep", services, '{"smollm2": "llm"}') as (stack, client):
            gateway = stack.replica_ids("llm-gateway")
            stack.wait_settled(llm=0)
            fetching_s = answered_after_s(client)
            fetched = hub.bodies("model.safetensors")
            assert fetched
            stack.wait_settled(ENDED_WITHIN_S, llm=0)
            assert [model.id for model in client.models.list()] == ["smollm2"], "it is listed while it sleeps"
            cached_s = answered_after_s(client)
            assert hub.bodies("model.safetensors") == fetched, "nothing is fetched again"
            assert stack.replica_ids("llm-gateway") == gateway, "it stays"
            awake_s = answered_after_s(client)
    print(f"\n  the first request: {fetching_s:.1f} s; from the volume: {cached_s:.1f} s; awake: {awake_s:.1f} s")


def answered_after_s(client: OpenAI) -> float:
    began = time.monotonic()
    assert chat(client, "smollm2")[0]
    return time.monotonic() - began
