"""What a user types after `pierhead`, the installed command: where each of its commands runs.

- here: what is about a project's directory, and what needs no stack
- in the project's own Python: what imports the user's modules
- by compose/machine/control.sh of the project: everything else; mostly in the controller's container
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .errors import ControllerError
from .project import handover, stack_files
from .project.commands import run_script
from .project.project import NoProject, Project, find

VERSION = "--version"
HERE = ("new", "init", "up", "down", "completion", "schema", "--help", "-h")
WITHOUT_A_STACK = ("validate", "simulate", "llm build")
OF_THE_MACHINE = ("node init", "node join", "node token")
UNREACHABLE = 3


def main() -> None:
    """Run the command line. Does not return where another program takes over."""
    try:
        _run(sys.argv[1:])
    except ControllerError as error:
        sys.stderr.write(f"pierhead: {error}\n")
        sys.exit(error.exit_code)


def _run(words: Sequence[str]) -> None:
    command = next(iter(words), "--help")
    if command == VERSION:
        sys.stdout.write(f"pierhead {stack_files.version()}, build {stack_files.build()}\n")
        return
    asks = "_PIERHEAD_COMPLETE" in os.environ  # a shell, for completions
    if command in handover.COMMANDS and not asks:
        handover.hand_over(words)
    if not asks and (command in HERE or {"--help", "-h"} & set(words)):
        _here()
        return
    first_two = " ".join(words[:2])
    needs_none = command in WITHOUT_A_STACK or first_two in WITHOUT_A_STACK
    try:
        project = find(Path.cwd())
    except NoProject:
        if first_two in OF_THE_MACHINE:
            _of_the_machine(words)
        if _is_known(command) and not (needs_none or asks or os.environ.get("PIERHEAD_API_URL")):
            raise
        _here()
        return
    if first_two in OF_THE_MACHINE and not project.is_clone and not stack_files.written_build(project.root):
        _of_the_machine(words)
    _in_project(project, words, is_silent=asks, needs_none=needs_none)


def _of_the_machine(words: Sequence[str]) -> NoReturn:
    """By the installed scripts, where no project has its own."""
    script = str(stack_files.machine_scripts() / "control.sh")
    os.execve(script, [script, *words], {**os.environ, "PIERHEAD_PROGRAM": sys.executable})  # noqa: S606 - no shell


def _in_project(project: Project, words: Sequence[str], *, is_silent: bool, needs_none: bool) -> None:
    if is_silent and project.is_clone and not stack_files.is_from(project.root):
        sys.exit(0)
    if not project.is_clone:
        written = stack_files.written_build(project.root)
        if not written and (needs_none or is_silent or os.environ.get("PIERHEAD_API_URL")):
            os.environ.setdefault("PIERHEAD_PROJECT_DIR", str(project.root))
            _here()
            return
        if not written and not _is_known(words[0]):
            _here()
            return
        if not written:
            _end(f"the stack of {project.root} does not run. Start it with: pierhead up")
        if not is_silent and written != (installed := stack_files.build()):
            sys.stderr.write(
                f"pierhead: {project.root} was brought up by another build of this tool ({written}; this is "
                f"{installed}); `pierhead up` brings both together\n"
            )
    run_script(project, "control.sh", words, {})


def _end(words: str) -> NoReturn:
    sys.stderr.write(f"pierhead: {words}\n")
    sys.exit(UNREACHABLE)


def _is_known(command: str) -> bool:
    """A word that is no command gets the command line's own answer."""
    from typer.main import get_command

    from .cli.app import app

    return command in getattr(get_command(app), "commands", ())


def _here() -> None:
    from .cli.app import main as run

    run()
