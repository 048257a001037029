"""Our services in containers: placeholder until MODE=containers is built."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

from tests.bench.cases import Subject
from tests.bench.processes import BenchError
from tests.bench.systems.running import Running, Workplace


def has_engine() -> bool:
    """Whether a Docker Engine answers."""
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@contextlib.contextmanager
def running(work: Workplace, subject: Subject, app: str) -> Iterator[Running]:
    """Start the stack."""
    raise BenchError("MODE=containers is not there yet")
    yield
