"""A command says which builds differ: its image's and the clone's, or its own and the controller's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.build import build_of
from controller.cli.versions import mismatch, stale_words
from tests.harness.http_answers import sends, serving

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as an image has it."""
    where = tmp_path / "app" / "controller"
    shutil.copytree(ROOT / "controller", where, ignore=shutil.ignore_patterns("__pycache__"))
    return where


def warning(installed: Path, project: Path = ROOT) -> str:
    return stale_words({"PIERHEAD_PROJECT_DIR": str(project)}, installed)


def test_the_same_code_is_no_warning(installed: Path, tmp_path: Path) -> None:
    assert warning(installed) == ""
    assert warning(ROOT / "controller") == "", "it is the clone itself"
    assert stale_words({}, installed) == ""
    (tmp_path / "controller").mkdir()
    (tmp_path / "controller" / "loop.py").write_text("theirs = True\n")
    assert warning(installed, tmp_path) == "", "a project that is no clone of Pierhead"


@pytest.mark.parametrize("change", [Path.unlink, Path.touch, lambda path: path.write_text("older = True\n")])
def test_other_code_is_a_warning_on_standard_error(installed: Path, change: Callable[[Path], object]) -> None:
    change(installed / "cli" / ("former.py" if change is Path.touch else "rows.py"))
    assert warning(installed) == (
        f"pierhead: the controller's image is of other code than this clone (build {build_of(installed)}, the clone's "
        f"is {build_of()}); `make up` builds and starts the clone's, `make build` only builds it"
    )


def test_in_a_project_the_stacks_copy_is_compared(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "shop" / ".pierhead").mkdir(parents=True)
    copy = Path(shutil.copytree(ROOT / "controller", tmp_path / "shop" / ".pierhead" / "controller"))
    assert warning(installed, tmp_path / "shop") == ""
    (copy / "loop.py").write_text("newer = True\n")
    assert warning(installed, tmp_path / "shop") == (
        f"pierhead: the controller's image is of other code than .pierhead/ (build {build_of(installed)}, there "
        f"{build_of(copy)}); `pierhead up` builds and starts what is there"
    )
    environment = {"PIERHEAD_PROJECT_DIR": str(tmp_path / "shop"), "PIERHEAD_PROGRAM": sys.executable}
    assert stale_words(environment, installed) == "", "the tool has said it"


def test_the_command_warns_and_goes_on(installed: Path) -> None:
    (installed / "loop.py").write_text("older = True\n")
    environment = {**os.environ, "PYTHONPATH": str(installed.parent), "PIERHEAD_PROJECT_DIR": str(ROOT)}
    command = [sys.executable, "-P", "-m", "controller.cli", "completion", "bash"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pierhead: the controller's image is of other code than this clone")
    asked = {**environment, "_PIERHEAD_COMPLETE": "complete_bash", "COMP_WORDS": "pierhead wh", "COMP_CWORD": "1"}
    done = subprocess.run(command[:4], env=asked, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["why"], ""), "no warning for a shell"


@pytest.mark.parametrize("info", [{"x-build": "0123456789ab"}, {}], ids=["another build", "one without a name"])
def test_a_controller_of_another_build_is_named(info: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda handler: sends(handler, 200, json.dumps({"info": info, "services": []}).encode())) as url:
        environment = {**os.environ, "PIERHEAD_API_URL": url, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "controller.cli", "status"]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"the controller is of another build ({info.get('x-build', 'unknown')}) than this command ({build_of()}), "
            "which cannot read its answer (KeyError: 'spec_problems'); bring both to the same version, or run "
            "`pierhead` on the controller's machine\n"
        )
    with serving(lambda handler: sends(handler, 200, json.dumps({"info": {"x-build": build_of()}}).encode())) as url:
        monkeypatch.setenv("PIERHEAD_API_URL", url)
        assert mismatch(KeyError("spec_problems")) is None, "it is a defect, whose traceback is wanted"
