"""The private parts of aiohttp are used in one file, which only a known version gets."""

from __future__ import annotations

import ast
from pathlib import Path

import aiohttp
import pierhead.http
import pytest
from pierhead.http.known import is_known

FILES = sorted(Path(pierhead.http.__file__).parent.glob("*.py"))


@pytest.mark.parametrize(
    ("version", "known"),
    [(aiohttp.__version__, True), ("3.14.99", True), ("3.15.0", False), ("3.140.0", False), ("4.0.0", False)],
)
def test_only_versions_that_are_known_are_taken(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiohttp, "__version__", version)
    assert is_known() is known


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "inside.py"], ids=lambda path: path.name)
def test_no_other_file_touches_private_parts_of_aiohttp(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("aiohttp")
        for alias in node.names
    }
    assert not {name for name in imported if name.startswith("_")}
    own = {"self", "cls", "context"}  # context: a named tuple, whose `_replace` is public
    touched = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in own)
    }
    assert not {name for name in touched if name.startswith("_") and not name.startswith("__")}
