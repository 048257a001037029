"""`python -m tests.environments.clients [check]`: clients of language models as people use them, in .state/clients.

Those of OpenAI and Anthropic, LangChain, LlamaIndex and LiteLLM. Seconds and 640 MB the first time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.environments.made import Environment, command, of_pins
from tests.harness.imports import ROOT

PINS = Path(__file__).with_suffix(".txt")
CLIENTS = Environment(ROOT / ".state" / "clients", PINS.read_bytes())


def make() -> None:
    """Raises NotMade."""
    of_pins(CLIENTS, PINS, "clients of language models")


if __name__ == "__main__":
    sys.exit(command(CLIENTS, make))
