"""What the README and the site show is run: blocks under `<!-- test -->`, page by page, on the running stack.

A ```bash or ```python block must exit with 0; a ```text block right behind it is what it prints, with "..." for
anything. Blocks write the default ports; the stack under test has others.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.commands import run
from tests.harness.stack import ROOT, Stack

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl"),
]

DEFAULT_PORTS = {"PIERHEAD_HTTP_PORT": 8000, "PIERHEAD_GRPC_PORT": 9000, "PIERHEAD_API_PORT": 8100}
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""What `docker compose logs` erases lines with, also where there is no terminal."""
_BLOCK = re.compile(r"<!-- test -->\n```(bash|python)\n(.*?)```\n(?:```text\n(.*?)```\n)?", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One block that is to be run."""

    language: str
    code: str
    prints: str
    """Empty: nothing is said of its output."""

    page: str

    @property
    def name(self) -> str:
        """Its page and its first line, for the test's id."""
        return f"{self.page}: {self.code.split(chr(10), 1)[0][:60]}"


def examples(page: Path) -> Iterator[Example]:
    for language, code, prints in _BLOCK.findall(page.read_text(encoding="utf-8")):
        yield Example(language, code, prints, page.stem)


def pattern(prints: str) -> re.Pattern[str]:
    """The text with "..." for anything, as a regular expression over the whole output."""
    return re.compile(".*".join(map(re.escape, prints.strip().split("..."))), re.DOTALL)


def on_ports_of(stack: Stack, code: str) -> str:
    for name, default in DEFAULT_PORTS.items():
        code = code.replace(f"127.0.0.1:{default}", f"127.0.0.1:{stack.ports[name]}")
    return code


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [pytest.param(each, id=each.name) for page in PAGES for each in examples(page)]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_does_what_the_page_says(stack: Stack, example: Example) -> None:
    interpreter = ["bash", "-euo", "pipefail", "-c"] if example.language == "bash" else [sys.executable, "-c"]
    own = {**stack.env, "PATH": f"{ROOT}:{stack.env.get('PATH', os.environ['PATH'])}"}  # where `pierhead` is
    done = run([*interpreter, on_ports_of(stack, example.code)], 300, ROOT, own)
    assert done.returncode == 0, done.stdout + done.stderr
    if example.prints:
        assert pattern(example.prints).fullmatch(_CONTROL.sub("", done.stdout).strip()), done.stdout
