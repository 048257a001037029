"""`python -m tests.environments.buckets [check]`: what the tests of model sources run in, in .state/buckets.

The libraries with which the LLM server's images read buckets and the Hugging Face hub, in the same versions, and
servers that speak the stores' protocols. Seconds and 230 MB the first time.
"""

from __future__ import annotations

import shutil
import sys

from tests.environments.made import Environment, command, with_uv
from tests.harness.imports import ROOT

PINS = ROOT / "services" / "llm" / "server" / "requirements" / "buckets.txt"
BUCKETS = Environment(ROOT / ".state" / "buckets", PINS.read_bytes())


def make() -> None:
    """Raises NotMade. The bytecode is compiled once: each server and replica is a process of its own."""
    python = shutil.which("python3.11") or sys.executable
    with_uv(f"Making {BUCKETS.directory}", "uv", "venv", "--clear", "--python", python, str(BUCKETS.directory))
    pip = ("uv", "pip", "install", "--python", BUCKETS.python, "--no-deps", "--compile-bytecode")
    with_uv("Installing s3fs, gcsfs, their servers and huggingface_hub", *pip, "--requirement", str(PINS))


if __name__ == "__main__":
    sys.exit(command(BUCKETS, make))
