"""An image of other code than the clone is told, whatever the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from controller.cli.clone import stale_words

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as an image has it."""
    where = tmp_path / "app" / "controller"
    shutil.copytree(ROOT / "controller", where, ignore=shutil.ignore_patterns("__pycache__"))
    return where


def told(installed: Path, project: Path = ROOT) -> str:
    return stale_words({"PIERHEAD_PROJECT_DIR": str(project)}, installed)


def test_the_same_code_is_nothing_to_tell(installed: Path, tmp_path: Path) -> None:
    assert told(installed) == ""
    assert told(ROOT / "controller") == "", "it is the clone itself"
    assert stale_words({}, installed) == ""
    (tmp_path / "controller").mkdir()
    (tmp_path / "controller" / "loop.py").write_text("theirs = True\n")
    assert told(installed, tmp_path) == "", "a project that is no clone of Pierhead"


def test_other_code_is_told_with_the_file_and_the_way_out(installed: Path) -> None:
    (installed / "cli" / "wait.py").write_text("older = True\n")
    assert told(installed) == (
        "pierhead: the controller's image is of other code than this clone (controller/cli/wait.py differs); "
        "`make up` builds and starts the clone's, `make build` only builds it"
    )


def test_files_that_only_one_of_both_has_are_a_difference(installed: Path) -> None:
    (installed / "cli" / "rows.py").unlink()
    assert "controller/cli/rows.py differs" in told(installed)
    (installed / "cli" / "former.py").touch()
    assert "controller/cli/former.py differs" in told(installed)


def test_the_command_says_so_on_standard_error_and_goes_on(installed: Path) -> None:
    (installed / "loop.py").write_text("older = True\n")
    environment = {**os.environ, "PYTHONPATH": str(installed.parent), "PIERHEAD_PROJECT_DIR": str(ROOT)}
    command = [sys.executable, "-P", "-m", "controller.cli", "completion", "bash"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "pierhead: the controller's image is of other code than this clone (controller/loop.py"
    )
    asked = {**environment, "_PIERHEAD_COMPLETE": "complete_bash", "COMP_WORDS": "pierhead wh", "COMP_CWORD": "1"}
    done = subprocess.run(command[:4], env=asked, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["why"], ""), "a shell that asks is told nothing"
