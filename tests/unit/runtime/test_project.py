"""The modules of a project: which they are, and that they are imported again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pierhead.dev.project import FolderFiles
from pierhead.tracebacks import user_traceback, where


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderFiles]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("from mine.inner import VALUE\n")
    (tmp_path / "mine" / "inner.py").write_text("VALUE = 1\n")
    for folder in (".hidden", "venv", "node_modules"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder.strip('.')}_module.py").write_text("VALUE = 0\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    before = set(sys.modules)
    yield FolderFiles(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_its_modules_and_files(project: FolderFiles) -> None:
    for name in ("mine", "hidden_module", "node_modules_module"):
        importlib.import_module(name)
    assert set(project.modules()) == {"mine", "mine.inner"}
    files = {project.root / "mine" / name for name in ("__init__.py", "inner.py")}
    assert project.imported_files() == set(project.all_files()) == files


def test_a_quick_save_is_read(project: FolderFiles) -> None:
    """Within one second and of one size, which is all that Python compares."""
    assert importlib.import_module("mine").VALUE == 1
    inner = project.root / "mine" / "inner.py"
    for value in (2, 3):
        inner.write_text(f"VALUE = {value}\n")
        former = project.forget()
        assert value == importlib.import_module("mine").VALUE
    inner.write_text("VALUE = (\n")
    former = project.forget()
    with pytest.raises(SyntaxError) as failure:
        importlib.import_module("mine")
    assert user_traceback(failure.value).splitlines()[1].endswith("in test_a_quick_save_is_read")
    assert where(failure.value).endswith("(inner.py:1)")
    project.put_back(former)
    assert importlib.import_module("mine").VALUE == 3
