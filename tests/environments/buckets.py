"""`python -m tests.environments.buckets [check]`: what the tests of model sources run in, in .state/buckets.

The libraries with which the LLM server's images read buckets and the Hugging Face hub, in the same versions, and
servers that speak the stores' protocols. Seconds and 230 MB the first time.
"""

from __future__ import annotations

import sys

from tests.environments.made import Environment, command, of_pins
from tests.harness.imports import ROOT

PINS = ROOT / "services" / "llm" / "server" / "requirements" / "buckets.txt"
BUCKETS = Environment(ROOT / ".state" / "buckets", PINS.read_bytes())


def make() -> None:
    """Raises NotMade."""
    of_pins(BUCKETS, PINS, "s3fs, gcsfs, their servers and huggingface_hub")


if __name__ == "__main__":
    sys.exit(command(BUCKETS, make))
