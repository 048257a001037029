"""A new plain key of x-serve is its declaration, its line in compose/reference.yaml, and its use: three files.

Each test adds one to a copy of the code, and asks the real readers in a process of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECLARATION, REFERENCE = "services/runtime/pierhead/serve_block.py", "compose/reference.yaml"
REFERENCE_TEST = "tests/unit/controller/test_spec_reference.py"
COPIED = ("services/runtime/pierhead", "controller", "docs/generate", REFERENCE, REFERENCE_TEST)

EDITS = {
    DECLARATION: [
        (
            "    max_queued_requests: Annotated[",
            '    linger_s: Annotated[float, Between(0.1, 60), Variable("PIERHEAD_LINGER_S")] = 1.5\n',
        ),
        ("    max_queued_requests: int\n", "    linger_s: float\n"),
    ],
    REFERENCE: [
        (
            "      # Requests that may wait at each caller",
            "      # How long it lingers. 0.1 to 60.\n      linger_s: 1.5\n\n",
        )
    ],
}
"""By file: the text before which a line is put, and the line."""
USE = '''
import json

from controller.errors import SpecError
from controller.files.parse import parse
from controller.files.schema import compose_schema, REFERENCE
from docs.generate import serve_block, settings as settings_page
from pathlib import Path
from pierhead import Service, Settings
from pierhead.dev.build import compose_text
from pierhead.runner.options import settings_of, options_of


class Scorer(Service, linger_s=2.5):
    """Its class has the key as a keyword."""


def read(block, **definition):
    service = {"image": "a", "scale": 0, "x-serve": block, **definition}
    try:
        return parse("shop", {"services": {"a": service}}).services["a"]
    except SpecError as error:
        return error.problems


bound = Scorer.bind()
env = dict(line.split("=", 1) for line in read({"linger_s": 2.5}).container["Env"])
default, changed = read({}), read({"linger_s": 2.5})
root = Path(REFERENCE).parents[1]
print(json.dumps({
    "variable": env["PIERHEAD_LINGER_S"],
    "new container": default.definition_hash != changed.definition_hash,
    "in the runtime": Settings.from_env(env).x_serve.linger_s,
    "by default": Settings.from_env({}).x_serve.linger_s,
    "in dev": settings_of("scorer", options_of(bound, {})).x_serve.linger_s,
    "in build": "linger_s: 2.5" in compose_text(bound, "a:b", "a"),
    "wrong": read({"linger_s": 61}),
    "misspelt": "linger_s" in read({"lingers": 1})[0],
    "by hand": read({}, environment={"PIERHEAD_LINGER_S": "1"}),
    "schema": compose_schema(REFERENCE.read_text())["$defs"]["ServeBlock"]["properties"]["linger_s"],
    "page": "### linger_s" in serve_block.page(root),
    "settings": [line for line in settings_page.replica() if "LINGER" in line],
}))
'''

INSTEAD = "the controller sets this variable; write x-serve.linger_s in its place"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what declares, reads and explains the keys, with one more of them."""
    for name in COPIED:
        source, copy = ROOT / name, tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    return tmp_path


def edit(tree: Path, name: str) -> None:
    text = (tree / name).read_text(encoding="utf-8")
    for before, line in EDITS[name]:
        assert text.count(before) == 1, before
        text = text.replace(before, line + before)
    (tree / name).write_text(text, encoding="utf-8")


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tree / "services" / "runtime"), str(tree)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_every_reader_has_it(tree: Path) -> None:
    for name in EDITS:
        edit(tree, name)
    (tree / "use.py").write_text(USE, encoding="utf-8")
    done = python(tree, "use.py")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found == {
        "variable": "2.5",
        "new container": True,
        "in the runtime": 2.5,
        "by default": 1.5,
        "in dev": 2.5,
        "in build": True,
        "wrong": ["services.a.x-serve.linger_s: expected a number of seconds from 0.1 to 60, found 61"],
        "misspelt": True,
        "by hand": [f"services.a.environment.PIERHEAD_LINGER_S: {INSTEAD}"],
        "schema": {
            "default": 1.5,
            "description": "How long it lingers. 0.1 to 60.",
            "maximum": 60,
            "minimum": 0.1,
            "type": "number",
        },
        "page": True,
        "settings": ["| PIERHEAD_LINGER_S | `x-serve.linger_s` |"],
    }


@pytest.mark.parametrize("explained", [False, True])
def test_the_reference_has_to_explain_it(tree: Path, explained: bool) -> None:
    for name in EDITS if explained else [DECLARATION]:
        edit(tree, name)
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", str(tree), "--import-mode", "importlib")
    done = python(tree, "-m", "pytest", *options, REFERENCE_TEST)
    assert (done.returncode == 0) is explained, done.stdout
