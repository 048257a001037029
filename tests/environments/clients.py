"""`python -m tests.environments.clients [check]`: clients of language models as people use them, in .state/clients.

Those of OpenAI and Anthropic, LangChain, LlamaIndex and LiteLLM. Seconds and 640 MB the first time.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.environments.made import Environment, command, with_uv
from tests.harness.imports import ROOT

PINS = Path(__file__).with_suffix(".txt")
CLIENTS = Environment(ROOT / ".state" / "clients", PINS.read_bytes())


def make() -> None:
    """Raises NotMade. The bytecode is compiled once: imports take most of what the tests take."""
    python = shutil.which("python3.11") or sys.executable
    with_uv(f"Making {CLIENTS.directory}", "uv", "venv", "--clear", "--python", python, str(CLIENTS.directory))
    pip = ("uv", "pip", "install", "--python", CLIENTS.python, "--no-deps", "--compile-bytecode")
    with_uv("Installing clients of language models", *pip, "--requirement", str(PINS))


if __name__ == "__main__":
    sys.exit(command(CLIENTS, make))
