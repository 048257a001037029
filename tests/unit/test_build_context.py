"""What images are built from does not depend on what was run in the clone before."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(each.name for each in (ROOT / "proto" / "pierhead").iterdir() if each.is_dir())
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("package", PACKAGES)
def test_generated_stubs_are_left_out_whole(package: str) -> None:
    directory = ROOT / "services" / "runtime" / "pierhead" / package
    assert f"services/runtime/pierhead/{package}" in IGNORED
    written = [each for each in directory.rglob("*.py") if each.relative_to(directory).parts[0] != "v1"]
    assert not written, "this is no package of stubs alone: leave out what is generated, file by file"
