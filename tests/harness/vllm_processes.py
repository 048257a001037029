"""LLM servers with a real vLLM as processes of this machine, by the Python of vLLM's own environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pierhead.llm_config import VARIABLE, LLMConfig

from tests.environments.vllm import MODELS, VLLM
from tests.harness.stack import ROOT, request

STARTED_WITHIN_S = 900.0
"""vLLM's start takes half a minute on two idle cores, and four minutes on busy ones."""
ENDED_WITHIN_S = 180.0
ANSWER_S = 600.0
"""Against what never answers: the engines share the cores."""
PLAIN = {"enforce_eager": True, "dtype": "float32", "gpu_memory_utilization": 0.15}
"""More than one engine is to have memory."""


def vllm_environment(**variables: str) -> dict[str, str]:
    """Of vLLM's processes. There are three of each engine, and what one has compiled the others shall read."""
    own = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "services/runtime:.", "VLLM_CPU_KVCACHE_SPACE": "1"}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | own | variables


def make_random_models(directory: Path, *names: str) -> None:
    """Write models of tests/environments/random_models.py to folders of these names."""
    command = [VLLM.python, "-m", "tests.environments.random_models", str(MODELS / "smollm2"), str(directory), *names]
    subprocess.run(command, cwd=ROOT, env=vllm_environment(), check=True, timeout=ANSWER_S)


@contextlib.contextmanager
def process(python: str, log: Path, *command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A module as a process of this machine, until the block ends; a failure says what it logged."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            [python, "-m", *command], cwd=ROOT, env=vllm_environment(**variables), stdout=output, stderr=output
        )
    try:
        yield running
    except BaseException:
        print(f"{command[0]} logged:\n{log.read_text()[-10_000:]}")
        raise
    finally:
        running.terminate()
        try:
            running.wait(timeout=ENDED_WITHIN_S)
        finally:
            running.kill()


def llm_server(
    config: LLMConfig, log: Path, lane: int, admin: int, **variables: str
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """An LLM server with vLLM, at these ports."""
    own = {"PIERHEAD_HOST": "127.0.0.1", "PIERHEAD_PORT": str(lane), "PIERHEAD_ADMIN_PORT": str(admin)}
    return process(VLLM.python, log, "pierhead.llm.server", **own, **{VARIABLE: config.to_json()}, **variables)


def is_ready(running: subprocess.Popen[bytes], port: int, path: str = "/readyz") -> bool:
    """Whether it takes requests. Fails at once where it has ended."""
    if running.poll() is not None:
        pytest.fail(f"{running.args!r} has ended with {running.returncode}")
    return request(f"http://127.0.0.1:{port}{path}").status == 200
