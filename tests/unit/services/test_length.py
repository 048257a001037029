"""The example applications stay as short as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("app", "most"), [("echo", 60), ("recsys", 300)])
def test_all_files_of_an_application_have_few_lines(app: str, most: int) -> None:
    """The files of services/recsys/triton, the variant with Triton, are not counted."""
    code = [path for path in (ROOT / "services" / app).iterdir() if path.suffix == ".py" or path.name == "Dockerfile"]
    assert len(code) > 1
    files = [*code, ROOT / "compose" / "apps" / f"{app}.yaml"]
    assert sum(len(path.read_text().splitlines()) for path in files) <= most
