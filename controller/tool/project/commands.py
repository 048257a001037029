"""`up`, `upgrade`, `down`, `init` and `build-images`: what each does with the project that it is typed in."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from . import stack_files
from .apps import chosen_files
from .down import down as remove
from .engines import NO_WATCH, ProjectEngine, own_program
from .programs import Programs, Told
from .project import FILES, Project, check, engine_of, find, own_files, refuse_outside, settle, validate
from .stack import ProjectStack
from .steps import say


def up(*, watch: bool = False, apps: str = "", gpu: str = "") -> None:
    """Start the project's stack; with `watch`, keep it up to date until Ctrl-C. `apps`, `gpu`: see `chosen_files`.

    Raises InvalidRequest before anything is written; NotUp, NotBuilt, Told.
    """
    project = find(Path.cwd())
    _refuse_another_clone(project)
    if (apps or gpu) and not project.is_clone:
        raise InvalidRequest("--apps and --gpu are for the apps of Pierhead's own repository. Nothing was changed.")
    if watch and project.is_clone:
        raise InvalidRequest("--watch is for a project of your own; in the clone: make build, then make deploy")
    if watch and engine_of(project, os.environ) is not ProjectEngine.DOCKER:
        raise InvalidRequest(NO_WATCH)
    since, variables = time.time(), _chosen(project, apps, gpu) if project.is_clone else _prepare(project)
    _bring_up(project, variables)
    if watch:
        _watch(project, variables, since)


def upgrade(file: str) -> None:
    """Write a backup into a file, then `up`. Raises as `up`, and Told without a backup, with nothing changed."""
    if file == "-":
        raise InvalidRequest("FILE: name a file; its secrets are not shown. Nothing was changed.")
    here = {"PIERHEAD_API_URL": ""}  # the stack of this directory, which `up` is about
    if status := Programs().call(*own_program("controller.tool", "backup", file), variables=here):
        raise Told(status)
    up()


def _bring_up(project: Project, variables: Mapping[str, str]) -> None:
    from .on_machine import OnMachine
    from .on_nodes import OnNodes
    from .up import StackUp

    stack = ProjectStack(project, {**os.environ, **variables}, Programs())
    engine = engine_of(project, os.environ)
    if project.is_clone:
        refuse_outside(project, stack.files.split(":"), os.environ)
    is_here = engine is ProjectEngine.DOCKER
    place = OnMachine(stack, validate, say, _complain) if is_here else OnNodes(stack, engine)
    try:
        StackUp(stack, place, say, _complain).run()
    except KeyboardInterrupt:
        up_again, down = stack.typed("up"), stack.typed("down")
        _complain(f"\nInterrupted. `{up_again}` continues from here; `{down}` removes what was started.")
        raise


def build_images(apps: str, gpu: str) -> None:
    """Build the images of the clone's stack. Raises InvalidRequest, NotBuilt, Told."""
    from . import images

    project = find(Path.cwd())
    _refuse_another_clone(project)
    stack = ProjectStack(project, {**os.environ, **_chosen(project, apps, gpu)}, Programs())
    images.build_images(stack, _complain, has_apps=bool(apps))


def _chosen(project: Project, apps: str, gpu: str) -> Mapping[str, str]:
    """The COMPOSE_FILE, where apps of the clone are chosen."""
    if not (apps or gpu):
        return {}
    return {FILES: chosen_files(project.root, apps, gpu, ProjectStack(project, os.environ, Programs()).files)}


def _watch(project: Project, variables: Mapping[str, str], since: float) -> None:
    from .compose import Compose
    from .update import Edited, update
    from .watch import FilesWatch

    def stack() -> ProjectStack:
        """With what `.env` says by now."""
        return ProjectStack(project, {**os.environ, **variables}, Programs())

    def config() -> Mapping[str, Any]:
        return Compose(stack()).config()

    def up_again() -> None:
        _bring_up(project, _prepare(project))

    def edited(services: Edited | None) -> None:
        update(stack(), services)

    try:
        asyncio.run(FilesWatch(project, config, up_again, edited, say).follow(since))
    except KeyboardInterrupt:
        say("\nStopped watching. The stack keeps running: `pierhead status` shows it, `pierhead down` removes it.")


def init() -> str:
    """Write what plain `docker compose up` needs; returns what to type. Raises InvalidRequest."""
    project = find(Path.cwd())
    if project.is_clone:
        return "This is Pierhead's own repository: `docker compose up` works as it is."
    _prepare(project)
    images = f"docker compose -f {stack_files.DIRECTORY}/compose/images.yaml build NAME"
    return (
        f"{project.root / stack_files.DIRECTORY} is of {stack_files.tag()} now. `pierhead up` starts everything; so "
        f"does `docker compose up`, after `{images}` for each pierhead/NAME that a Dockerfile begins with or "
        "a service runs."
    )


def down(*, volumes: bool, force: bool, images: bool) -> None:
    """Remove the project's stack. Raises InvalidRequest, NotRemoved."""
    project = find(Path.cwd())
    if not project.is_clone and not stack_files.written_build(project.root):
        if stack_files.DIRECTORY not in (project.env_file().get(FILES) or ""):
            say(f"{project.root} has no stack of Pierhead's: there is nothing to remove.")
            return
        stack_files.write(project.root)  # it was removed, and the stack's compose file is in it
    stack = ProjectStack(project, os.environ, Programs())
    try:
        remove(stack, _complain, volumes=volumes, force=force, images=images)
    except KeyboardInterrupt:
        _complain(f"Interrupted: some of the stack may be left. `{stack.typed('down')}` again continues from here.")
        raise


def _refuse_another_clone(project: Project) -> None:
    if project.is_clone and not stack_files.is_from(project.root):
        raise InvalidRequest(
            f"{project.root} is a clone of Pierhead, with a program of its own: type ./pierhead or make there"
        )


def _prepare(project: Project) -> Mapping[str, str]:
    """Check the project and write what it lacks; returns variables for Compose. Raises InvalidRequest."""
    files = own_files(project, os.environ)
    check(project, files, os.environ)
    try:
        settle(project, files, os.environ, say)
    except OSError as error:
        raise InvalidRequest(
            f"{error.filename} cannot be written: {error.strerror}. Pierhead keeps {stack_files.DIRECTORY}/ and lines "
            "of .env in the project's directory. Nothing was started."
        ) from None
    if FILES not in os.environ:
        return {}
    return {FILES: ":".join([*files, stack_files.STACK_FILES[ProjectEngine.DOCKER]])}


def _complain(words: str) -> None:
    sys.stderr.write(f"{words}\n")
