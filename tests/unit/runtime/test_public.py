"""The public door."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pierhead
import pytest

PACKAGE = Path(pierhead.__file__).parent


def test_all_is_sorted_and_complete() -> None:
    assert pierhead.__all__ == sorted(pierhead.__all__, key=lambda name: (not name.isupper(), name))
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert set(pierhead.__all__) == imported - {"events"}


@pytest.mark.parametrize("name", pierhead.__all__)
def test_everything_public_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(pierhead, name))


def test_a_service_without_http_brings_no_http_and_no_array_library() -> None:
    """aiohttp takes 14 MB of a replica's 57."""
    source = (
        "import pierhead, pierhead.replica.server, sys\n"
        "print(sorted({'aiohttp', 'numpy', 'torch', 'pandas'} & set(sys.modules)), pierhead.sse.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] sse"


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "v1")  # v1: generated stubs


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
