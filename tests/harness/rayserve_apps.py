"""Runs applications on one of the systems, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.environments.ray_serve import RAY_SERVE
from tests.harness.imports import ROOT
from tests.harness.ports import free_ports

HERE = ROOT / "tests" / "rayserve"
RECORDED = HERE / "recorded.json"
"""What Ray Serve 2.60 answered."""


def applications() -> list[str]:
    return sorted(path.stem for path in (HERE / "apps").glob("*.py"))


def own_python() -> str:
    """This process's Python."""
    return sys.executable


def rays_python() -> str | None:
    """The Python of the environment with Ray Serve; None where it has not been made."""
    return RAY_SERVE.python if RAY_SERVE.is_made() else None


def answers(system: str, python: str, names: Sequence[str], out: Path) -> dict[str, Any]:
    """What applications answer on a system."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIERHEAD_")}
    if system != "ray":
        before = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "services" / "runtime"), str(ROOT), before])
    else:
        environment["RAY_USAGE_STATS_ENABLED"] = "0"
    log = out.with_suffix(".log")
    with log.open("wb") as output:
        ended = subprocess.run(
            [python, str(HERE / "driver.py"), system, *names, "--port", str(free_ports(1)[0]), "--out", str(out)],
            env=environment, stdout=output, stderr=output, check=False, timeout=280 if system != "ray" else 3000,
        )  # fmt: skip
    text = log.read_text(encoding="utf-8", errors="replace")
    assert ended.returncode == 0, text[-4000:]
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def recorded() -> dict[str, Any]:
    """What Ray Serve answered when it was asked last."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found
