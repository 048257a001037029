"""Commands as a user types them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Ended = subprocess.CompletedProcess[str]


def run(command: Sequence[str | Path], timeout_s: float, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command to its end, whatever its exit status; what it writes is text."""
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
