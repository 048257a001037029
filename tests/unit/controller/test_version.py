from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from controller.tool.project.version import version_of

DECLARED = '[project]\nversion = "1.2.0"\n'
IDENTITY = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ("", r"1\.2\.0"),
        ("init", r"1\.2\.0"),
        ("init, commit", r"1\.2\.0\.dev1\+g[0-9a-f]{8}"),
        ("init, commit, commit", r"1\.2\.0\.dev2\+g[0-9a-f]{8}"),
        ("init, commit, tag v1.2.0", r"1\.2\.0"),
        ("init, commit, tag v1.1.0", r"1\.2\.0\.dev1\+g[0-9a-f]{8}"),
        ("init, commit, tag v1.2.0, edit", r"1\.2\.0\.dev1\+g[0-9a-f]{8}\.dirty"),
        ("init .., -C .. commit", r"1\.2\.0"),
    ],
)
def test_a_version_names_the_commit_that_it_is_built_from(tmp_path: Path, history: str, expected: str) -> None:
    root = tmp_path / "clone"
    declared = root / "services" / "runtime" / "pyproject.toml"
    declared.parent.mkdir(parents=True)
    declared.write_text(DECLARED)
    own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **IDENTITY}
    for words in filter(None, history.split(", ")):
        if words == "edit":
            declared.write_text(f"{DECLARED}\n")
            continue
        where, asked = (tmp_path, words.removeprefix("-C .. ")) if "-C" in words else (root, words)
        commands = [["add", "."], ["commit", "-qm", "x", "--allow-empty"]] if asked == "commit" else [asked.split()]
        for command in commands:
            subprocess.run(["git", *command], cwd=where, env=own, check=True, capture_output=True)
    assert re.fullmatch(expected, version_of(root))
