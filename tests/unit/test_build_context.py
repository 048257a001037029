"""What images are built from does not depend on what was run in the clone before."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(each.name for each in (ROOT / "proto" / "pierhead").iterdir() if each.is_dir())
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("package", PACKAGES)
def test_generated_stubs_are_left_out_whole_and_written_code_is_not(package: str) -> None:
    directory = ROOT / "services" / "runtime" / "pierhead" / package
    written = [each for each in directory.rglob("*.py") if each.relative_to(directory).parts[0] != "v1"]
    whole, stubs = f"services/runtime/pierhead/{package}", f"services/runtime/pierhead/{package}/v1"
    assert [line for line in IGNORED if line in (whole, stubs)] == [stubs if written else whole]
