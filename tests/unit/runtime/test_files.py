"""What the tool writes does not go where a link of somebody else leads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pierhead.dev import build
from pierhead.files import replace_file
from pierhead.rayserve.pickles import write_secret

from controller.tool.project import stack_files
from controller.tool.project.env_file import EnvFile


def _env_file(directory: Path) -> None:
    file = EnvFile(directory / ".env")
    file.append("A=1")
    assert file.save()


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a line of .env": (_env_file, ".env.new"),
    "a secret of .env": (lambda root: write_secret(root / ".env"), ".env.new"),
    "the stack's files": (lambda root: stack_files._write(root / "stack.yaml", b"x"), "stack.yaml.new"),
    "the stack's files themselves": (lambda root: stack_files._write(root / "stack.yaml", b"x"), "stack.yaml"),
    "build": (lambda root: build._write({root / "compose.yaml": "x"}, force=True), "compose.yaml"),
    "a file": (lambda root: replace_file(root / "a", b"x"), "a"),
}


@pytest.mark.parametrize(("write", "link"), WRITERS.values(), ids=WRITERS)
def test_a_link_is_not_followed(tmp_path: Path, write: Callable[[Path], object], link: str) -> None:
    somebodys = tmp_path / "somebodys"
    somebodys.write_text("mine")
    root = tmp_path / "project"
    root.mkdir()
    (root / link).symlink_to(somebodys)
    write(root)
    assert somebodys.read_text() == "mine"


def test_a_file_is_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"before")
    file.chmod(0o640)
    replace_file(file, b"after")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"after", 0o640)
    replace_file(file, b"x", 0o755)
    assert file.stat().st_mode & 0o777 == 0o755
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path, b"x")
    assert [each.name for each in tmp_path.iterdir()] == ["a"], "nothing else is left behind"


def test_a_secret_makes_the_env_file_its_owners(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=1\n")
    (tmp_path / ".env").chmod(0o644)
    assert write_secret(tmp_path / ".env")
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
