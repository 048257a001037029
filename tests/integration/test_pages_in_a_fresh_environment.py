"""The pages on classes and tests, as their reader runs them: with the wheel, what the pages name, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.stack import ROOT
from tests.harness.wheel import build_wheel, environment

EXAMPLES = sorted(path.parent for path in (ROOT / "docs" / "examples").glob("*/app.py"))
FILES = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of the environment."""
    wheel = build_wheel(tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel"))
    packages = ("fastapi", "numpy", "pillow", "pytest", "redis")  # of the pages and of the examples
    return environment(tmp_path_factory.mktemp("tried") / "venv", f"{wheel}[asgi]", *packages)


def write_files_of(page: str, into: Path) -> None:
    for name, text in FILES.findall((ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")):
        (into / name).write_text(text, encoding="utf-8")


def run(command: list[str | Path], directory: Path) -> str:
    """What a command prints in a directory, without anything of this test's environment."""
    path = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=directory, env=path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_test_shown_passes_under_plain_pytest(programs: Path, tmp_path: Path) -> None:
    write_files_of("develop.md", tmp_path)
    assert "1 passed" in run([programs / "pytest", "-q"], tmp_path)


def test_the_class_shown_is_an_application(programs: Path, tmp_path: Path) -> None:
    write_files_of("service-as-a-class.md", tmp_path)
    assert "scorer:" in run([programs / "python", "-m", "pierhead", "build", "shop:shop"], tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_of_the_gallery_passes_its_own_tests(example: Path, programs: Path, tmp_path: Path) -> None:
    shutil.copytree(example, tmp_path / "example")
    assert " passed" in run([programs / "pytest", "-q"], tmp_path / "example")
