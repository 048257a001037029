"""`make bench-llm QUICK=1`, without the peer: everything starts, is measured without an error, and ends on a page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.stack import ROOT


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_quick_run_measures_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.llm", "QUICK=1", f"OUT={tmp_path}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert {sample["part"] for sample in found["samples"]} == {"overhead", "linear", "prefix"}
    assert all(sample["tokens"] and not sample["errors"] for sample in found["samples"])
    page = (tmp_path / "README.md").read_text()
    for title in ("## Targets", "## Overhead", "## Linearity", "## Routing by prefix"):
        assert title in page
    assert {path.name for path in tmp_path.glob("*.png")} == {"overhead.png", "linear.png", "prefix.png"}
