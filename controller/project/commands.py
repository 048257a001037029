"""`up`, `down` and `init`: what a project needs is written, then the scripts of the machine go on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import InvalidRequest
from . import stack_files
from .project import FILES, Project, check, find, own_files, settle


def up() -> NoReturn:
    """Start the project's stack. Raises InvalidRequest before anything is written."""
    project = find(Path.cwd())
    run_script(project, "up.sh", (), {} if project.is_clone else _prepare(project))


def init() -> str:
    """Write what plain `docker compose up` needs; returns what to type. Raises InvalidRequest."""
    project = find(Path.cwd())
    if project.is_clone:
        return "This is Pierhead's own repository: `docker compose up` works as it is."
    _prepare(project)
    images = f"docker compose -f {stack_files.DIRECTORY}/compose/images.yaml build"
    return (
        f"{project.root / stack_files.DIRECTORY} is of {stack_files.tag()} now. `pierhead up` starts everything; so "
        f"does `docker compose up`, after `{images}` where a Dockerfile begins with pierhead/python."
    )


def down(*, volumes: bool, force: bool) -> NoReturn:
    """Remove the project's stack."""
    project = find(Path.cwd())
    if not project.is_clone and not stack_files.written_build(project.root):
        if stack_files.DIRECTORY not in (project.env_file().get(FILES) or ""):
            _say(f"{project.root} has no stack of Pierhead's: there is nothing to remove.")
            sys.exit(0)
        stack_files.write(project.root)  # it was removed, and the scripts that remove a stack are in it
    run_script(project, "down.sh", ("1" if volumes else "", "1" if force else ""), {})


def run_script(project: Project, script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become one of the machine's scripts: the installed one, as a project may have come with a `.pierhead/`.

    Raises InvalidRequest in a clone that is not this program's own: what is in it was not chosen by the user.
    """
    if project.is_clone and not stack_files.is_from(project.root):
        raise InvalidRequest(
            f"{project.root} is a clone of Pierhead, with a program of its own: type ./pierhead or make there"
        )
    if project.is_clone:
        own, path = {}, str(project.root / "compose" / "machine" / script)
    else:
        own = {"PIERHEAD_PROGRAM": sys.executable, "PIERHEAD_PROJECT_ROOT": str(project.root)}
        path = str(stack_files.machine_scripts() / script)
    sys.stdout.flush()
    os.execve(path, [path, *arguments], {**os.environ, **own, **environment})  # noqa: S606 - no shell is needed


def _prepare(project: Project) -> Mapping[str, str]:
    """Check the project and write what it lacks; returns variables for the scripts."""
    files = own_files(project, os.environ)
    check(project, files)
    settle(project, files, os.environ, _say)
    if FILES not in os.environ:
        return {}
    return {FILES: ":".join([*files, stack_files.STACK_FILES["docker"]])}


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
