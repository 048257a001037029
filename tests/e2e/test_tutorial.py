"""The site's tutorial, step by step, on a stack of its own: its files, its commands, its answers."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.stack import ROOT, Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)
"""Path and text of each, in the order of the page; a later one replaces an earlier one of the same path."""
APP = "services/hello/app.py"
DEFINITION = "compose/apps/hello.yaml"
MISTAKE = 'raise RuntimeError("no model here")'
COMPOSE_FILE = "test-evidence/tutorial/hello.yaml"
"""Where the test has DEFINITION: in the clone, as the controller reads nothing else, and not among its files."""


@dataclass
class Reader:
    """Who does what the page says, with the code in a directory of its own."""

    stack: Stack
    directory: Path

    def write(self, path: str, text: str) -> None:
        if path == DEFINITION:
            text = text.replace("context: ..", f"context: {self.directory}").replace(
                "example/hello", "pierhead-test/hello"
            )
            (ROOT / COMPOSE_FILE).write_text(text)
            return
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        tag = os.environ.get("PIERHEAD_TAG", "latest")
        file.write_text(text.replace("FROM pierhead/python", f"FROM pierhead/python:{tag}"))

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.directory / path
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def build(self) -> None:
        done = self.stack.compose("build", "hello")
        assert done.returncode == 0, done.stderr

    def deploy(self) -> int:
        return self.stack.pierhead("deploy").returncode

    def greeting(self, name: str) -> object:
        return self.stack.get(f"/hello?name={name}").json


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (ROOT / COMPOSE_FILE).parent.mkdir(parents=True, exist_ok=True)
    stack = Stack("pierhead-test-tutorial", ["compose/apps/echo.yaml", COMPOSE_FILE])
    reader = Reader(stack, tmp_path)
    for path, text in FILES[:3]:
        reader.write(path, text)
    try:
        reader.build()
        with stack.running("tutorial-stack"):
            yield reader
    finally:
        shutil.rmtree((ROOT / COMPOSE_FILE).parent)


def shown(number: int) -> object:
    """The answer that the page shows for the number-th time."""
    return json.loads(re.findall(r"^```text\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)[number].split("\n")[0])


def test_the_tutorial(reader: Reader) -> None:
    stack = reader.stack
    stack.wait_settled(hello=1)
    eventually(lambda: stack.get("/hello?name=Ada").status == 200, "hello answers")
    assert reader.greeting("Ada") == shown(0)

    stack.scale("hello", 3)
    assert stack.service("hello")["ready"] == 3
    stack.pierhead("scale", "hello", "auto")

    reader.edit(APP, 'f"Hello,', 'f"Good day,')
    reader.build()
    assert reader.deploy() == 0
    assert reader.greeting("Ada") == shown(1)

    reader.edit(APP, "app = Hello.bind()", f"{MISTAKE}\napp = Hello.bind()")
    reader.build()
    assert reader.deploy() == 1
    assert reader.greeting("Ada") == shown(1), "the version that works serves"
    assert "no model here" in stack.pierhead("why", "hello").stdout

    for path, text in FILES[3:]:
        reader.write(path, text)
    reader.build()
    stack.up()
    assert reader.deploy() == 0
    stack.wait_settled(shout=2)
    eventually(lambda: reader.greeting("Ada") == shown(2), "the second service answers")
    refused = stack.get("/hello?name=").json["error"]
    assert (refused["code"], refused["message"]) == ("bad_request", "text: expected some, found none")
