"""A command says which builds differ: its image's and the clone's, or its own and the controller's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from controller.build import build_of
from controller.tool.client import mismatch, stale_words
from tests.harness.http_answers import sends, serving

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("where", "theirs", "words"),
    [
        (
            "clone",
            "0123456789ab",
            "this clone (build 0123456789ab, the clone's is {ours}); `make up`",
        ),
        (
            "directory",
            "0123456789ab",
            "this tool (build 0123456789ab, the tool's is {ours}); `pierhead up`",
        ),
        ("clone", build_of(), ""),
        ("clone", "", ""),
        ("", "0123456789ab", ""),
    ],
    ids=["a clone's", "a project's", "the same code", "a controller that does not say", "another machine's"],
)
def test_other_code_is_a_warning(where: str, theirs: str, words: str) -> None:
    wanted = (
        f"pierhead: the controller's image was built from other code than {words}".format(ours=build_of())
        if words
        else ""
    )
    assert stale_words(where, theirs).startswith(wanted)
    assert bool(stale_words(where, theirs)) is bool(words)


def test_the_build_is_that_of_the_code(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT / "controller", tmp_path / "controller", ignore=shutil.ignore_patterns("__pycache__"))
    assert build_of(copy) == build_of()
    (copy / "loop.py").write_text("older = True\n")
    assert build_of(copy) != build_of()


def test_the_command_warns_once_and_continues() -> None:
    answer = json.dumps({"at": 0.0, "nodes": [], "engine_reachable": True}).encode()
    with serving(lambda handler: sends(handler, 200, answer, {"X-Pierhead-Build": "0123456789ab"})) as url:
        environment = {**os.environ, "PIERHEAD_API_URL": url, "PYTHONPATH": str(ROOT), "PIERHEAD_OWN_STACK": "clone"}
        command = [sys.executable, "-m", "controller.tool.command", "nodes"]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pierhead: the controller's image was built from other code than this clone")


def test_a_controller_without_the_path_is_named() -> None:
    missing = json.dumps({"error": {"code": "not_found", "message": "there is nothing at /x"}}).encode()
    with serving(lambda handler: sends(handler, 404, missing, {"X-Pierhead-Build": "0123456789ab"})) as url:
        environment = {**os.environ, "PIERHEAD_API_URL": url, "PYTHONPATH": str(ROOT), "PIERHEAD_OWN_STACK": "clone"}
        command = [sys.executable, "-m", "controller.tool.command", "llm", "wake", "llm"]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    warning, error = done.stderr.splitlines()
    assert (done.returncode, error) == (2, "there is nothing at /x")
    assert warning.startswith("pierhead: the controller's image was built from other code than this clone")


FORMER = {"project": "p", "at": 1.0, "services": [], "gpus": [], "nodes": [], "machine": None, "gpu_memory_problem": ""}
"""An answer that lacks a member."""


@pytest.mark.parametrize("info", [{"x-build": "0123456789ab"}, {}], ids=["another build", "one without a name"])
def test_a_controller_of_another_build_is_named(info: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda handler: sends(handler, 200, json.dumps({"info": info, **FORMER}).encode())) as url:
        environment = {**os.environ, "PIERHEAD_API_URL": url, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "controller.tool.command", "status"]
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
