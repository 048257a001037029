"""`python -m tests.environments.ray_serve [check]`: Ray Serve, for the tests of its answers and for the benches.

Outside the clone, so that several share it. A minute and 2 GB the first time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.environments.made import TORCH, Environment, command, run, with_uv
from tests.environments.vllm import VLLM
from tests.environments.vllm import make as make_vllm
from tests.harness.imports import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pierhead-bench"
_PINS = ROOT / "tests" / "bench" / "peer" / "requirements.txt"
_PINS_LLM = _PINS.with_name("requirements-llm.txt")
_PACKAGES = "lib/python3.11/site-packages"
_PYTHON = f"Python {sys.version.split()[0]}\n".encode()
RAY_SERVE = Environment(CACHE / "ray-serve", _PINS.read_bytes() + _PYTHON)
RAY_SERVE_LLM = Environment(
    CACHE / "ray-serve-llm", _PINS.read_bytes() + _PINS_LLM.read_bytes() + f"{VLLM.directory}\n".encode()
)


def make() -> None:
    """Raises NotMade."""
    _begin(RAY_SERVE, sys.executable)
    pip = ("uv", "pip", "install", "--python", RAY_SERVE.python)
    with_uv("Installing Ray Serve (about a minute)", *pip, "--requirement", str(_PINS))
    torch = (*pip, TORCH) if has_nvidia() else ("install_cpu_torch", RAY_SERVE.python, TORCH)
    with_uv("Installing PyTorch for Ray Serve", *torch)


def make_llm() -> None:
    """Ray Serve LLM imports vLLM, whose place the tests' own takes. Raises NotMade."""
    VLLM.make(make_vllm)
    _begin(RAY_SERVE_LLM, VLLM.python)
    pip = ("uv", "pip", "install", "--python", RAY_SERVE_LLM.python, "--requirement", str(_PINS))
    packages = ("--override", str(_PINS_LLM), "pyarrow", "pandas", "jsonref", "hf-transfer")
    with_uv("Installing Ray Serve LLM", *pip, *packages)
    (RAY_SERVE_LLM.directory / _PACKAGES / "vllm.pth").write_text(f"{VLLM.directory / _PACKAGES}\n")
    run("Importing Ray Serve LLM", [RAY_SERVE_LLM.python, "-c", "import ray.serve.llm"], {})


def has_nvidia() -> bool:
    """Whether this machine has a GPU of NVIDIA's."""
    if shutil.which("nvidia-smi") is None:
        return False
    return bool(subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout)


def _begin(environment: Environment, python: str) -> None:
    words = ("uv", "venv", "--clear", "--python", str(Path(python).resolve()), str(environment.directory))
    with_uv(f"Making {environment.directory}", *words)


if __name__ == "__main__":
    sys.exit(command(RAY_SERVE, make))
