"""vLLM itself, on the CPU, with a real model, in vLLM's own environment: its part of the engines' contract suite, and a
question that goes the whole way, OpenAI's client -> HAProxy -> gateway -> gRPC -> LLM server -> vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from pierhead.llm_config import VARIABLE, LLMConfig, ModelLoading

from controller.model import AddServer, ProbeSpec, ServiceSpec, WriteRouting, backend_name
from controller.routing.haproxy import HAProxyRouter
from tests.harness.haproxy_container import HAProxyContainer, build, docker
from tests.harness.stack import ROOT, free_ports, request
from tests.harness.waiting import eventually, seconds_until

STATE = os.environ.get("PIERHEAD_VLLM_STATE", str(ROOT / ".state"))
START_AND_TESTS_S = 1500
"""vLLM's start alone takes a minute on two idle cores, and four on busy ones."""


def made() -> bool:
    """Whether vLLM's environment and the models are there, as they should be."""
    return subprocess.run(["compose/machine/vllm-cpu.sh", "check"], cwd=ROOT, check=False).returncode == 0


pytestmark = [
    pytest.mark.timeout(START_AND_TESTS_S + 60),
    pytest.mark.skipif(not made(), reason="no vLLM here; compose/machine/vllm-cpu.sh makes it"),
]
VLLM_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "services/runtime:.", "VLLM_CPU_KVCACHE_SPACE": "1"}


def test_vllm_is_what_every_engine_is() -> None:
    environment = os.environ | VLLM_ENVIRONMENT | {"PIERHEAD_TEST_LLM_MODEL": f"{STATE}/models/smollm2"}
    # vLLM's dependencies warn of each other; what the other tests share needs packages that its environment lacks.
    options = ["--noconftest", "--override-ini=filterwarnings=", "-p", "no:cacheprovider", "--timeout=600"]
    command = [f"{STATE}/vllm/bin/python", "-m", "pytest", *options, "-k", "vllm", "tests/contract/test_llm_engines.py"]
    began = time.monotonic()
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=START_AND_TESTS_S, check=False
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40, "it ran"
    print(f"\n  {run.stdout.splitlines()[-1]}; {time.monotonic() - began:.0f} s with vLLM's start")


# ------------------------------------------------------------------------------------------------------ the whole way

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
STARTED_WITHIN_S = 600.0


@contextlib.contextmanager
def process(module: str, python: str, log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of our services as a process of this machine, until the block ends; a failure says what it logged."""
    environment = os.environ | VLLM_ENVIRONMENT | variables
    with log.open("wb") as output:
        running = subprocess.Popen([python, "-m", module], cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        yield running
    except BaseException:
        print(f"{module} logged:\n{log.read_text()[-10_000:]}")
        raise
    finally:
        running.terminate()
        try:
            running.wait(timeout=60)
        finally:
            running.kill()


def is_ready(running: subprocess.Popen[bytes], admin: int) -> bool:
    """Whether it takes requests. Fails at once where it has ended."""
    if running.poll() is not None:
        pytest.fail(f"{running.args!r} has ended with {running.returncode}")
    return request(f"http://127.0.0.1:{admin}/readyz").status == 200


@pytest.fixture
def haproxy() -> Iterator[HAProxyContainer]:
    run_dir = Path(tempfile.mkdtemp(prefix="pierhead-haproxy-"))
    image = build()
    try:
        with HAProxyContainer(run_dir).running() as container:
            yield container
    finally:
        docker("rmi", "--force", image)
        shutil.rmtree(run_dir)


def route_all_to(haproxy: HAProxyContainer, port: int) -> None:
    """Have HAProxy send every request to that port of this machine, as the controller would."""
    router = HAProxyRouter(haproxy.run_dir)
    gateway = ServiceSpec(
        name="gateway", image="gateway", protocol="http", port=port, replicas=1, route="/", request_timeout_s=300,
        probe=ProbeSpec(port=port, path="/v1/models"),
    )  # fmt: skip

    async def do() -> None:
        routing = WriteRouting(target="routing", services=(gateway,), routing_hash=router.routing_hash([gateway]))
        await router.perform(routing, None)
        add = AddServer(
            target="gateway-1", service="gateway", backend=backend_name("gateway"),
            address=f"{haproxy.gateway}:{port}",
        )  # fmt: skip
        await router.perform(add, gateway)

    asyncio.run(do())


@pytest.mark.engine
def test_the_capital_of_france(haproxy: HAProxyContainer, tmp_path: Path) -> None:
    began = time.monotonic()
    lane, lane_admin, http, http_admin = map(str, free_ports(4))
    config = LLMConfig(
        model_loading=ModelLoading(model_id="smollm2", model_source=f"{STATE}/models/smollm2"),
        # As in compose/apps/llm.yaml.
        engine_kwargs={
            "max_model_len": 2048, "enforce_eager": True, "dtype": "float32", "gpu_memory_utilization": 0.3,
        },
    )  # fmt: skip
    server = process(
        "services.llm.server", f"{STATE}/vllm/bin/python", tmp_path / "server.log",
        PIERHEAD_HOST="127.0.0.1", PIERHEAD_PORT=lane, PIERHEAD_ADMIN_PORT=lane_admin, **{VARIABLE: config.to_json()},
    )  # fmt: skip
    gateway = process(
        "services.llm.gateway", sys.executable, tmp_path / "gateway.log",
        PIERHEAD_PORT=http, PIERHEAD_ADMIN_PORT=http_admin, PIERHEAD_STATIC_LLM=f"127.0.0.1:{lane}",
        PIERHEAD_LLM_MODELS=json.dumps({"smollm2": "llm", "default": {"service": "llm", "alias_of": "smollm2"}}),
    )  # fmt: skip
    with server as vllm, gateway as edge:
        started_s = seconds_until(lambda: is_ready(vllm, int(lane_admin)), "vLLM is ready", STARTED_WITHIN_S)
        eventually(lambda: is_ready(edge, int(http_admin)), "the gateway is ready")
        route_all_to(haproxy, int(http))
        url = f"http://{haproxy.ip}:8000/v1"
        eventually(lambda: request(f"{url}/models").status == 200, "HAProxy has the gateway")
        with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            asked = time.monotonic()
            whole = client.chat.completions.create(model="default", messages=QUESTION, max_tokens=32, temperature=0)
            stream = client.chat.completions.create(
                model="smollm2", messages=QUESTION, max_tokens=32, temperature=0, stream=True
            )
            parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
            took_s = time.monotonic() - asked
    text = whole.choices[0].message.content
    print(f"\n  whole: {text!r}\n  streamed: {parts!r}\n  vLLM started in {started_s:.0f} s, two answers took "
          f"{took_s:.1f} s, all of it {time.monotonic() - began:.0f} s")  # fmt: skip
    assert text is not None
    assert "Paris" in text
    assert "".join(parts) == text
    assert len([part for part in parts if part]) > 3, "it came in pieces"
