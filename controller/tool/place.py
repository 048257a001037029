"""Where a command runs. This is the only place that decides it.

- here, in this process: most commands. They ask the controller's API: at PIERHEAD_API_URL, else at the Unix socket that
  the project's controller has on this machine, if it lets this user in, else at its port. Commands that need no stack
  ask nobody.
- in the project's own Python: what imports the user's modules
- `docker compose logs`: the logs of the stack's own services
- the program of another engine (project/engines.py): its nodes, and every command about a stack there
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ControllerError, InvalidRequest
from .bundle import NO_API
from .project import handover, stack_files
from .project.engines import OF_NODES
from .project.programs import Programs
from .project.project import NoProject, Project, find
from .project.stack import ControllerContainer, NoStack, ProjectStack, started_from

HERE = (
    *("new", "init", "up", "upgrade", "build-images", "down", "completion", "schema", "simulate", "token"),
    *("--help", "-h"),
)
WITHOUT_A_STACK = ("validate", "llm build")
ALSO_WITHOUT_AN_API = ("bundle",)
"""The commands that work where no API can be asked. They have the reason in a variable."""
OF_THE_MACHINE = ("node init", "node join", "node token")
LOG_LINES = "200"
EXAMPLES: Mapping[str, tuple[str, str]] = {
    "scale": ("scale SERVICE=ranker N=4", "scale ranker 4"),
    "why": ("why SERVICE=ranker", "why ranker"),
    "rollback": ("rollback SERVICE=ranker", "rollback ranker"),
}
"""What make hands over empty words for, where a user leaves them out."""


@dataclass(frozen=True)
class Here:
    """In this process, with these variables. `status`: the exit status where the command itself ends with 0."""

    variables: Mapping[str, str] = field(default_factory=dict)
    status: int = 0


@dataclass(frozen=True)
class There:
    """By another program, which takes this process's place in `directory`."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None


def main() -> None:
    """Run the command line. Does not return where another program takes over."""
    words, programs = sys.argv[1:], Programs()
    try:
        match decide(words, Path.cwd(), os.environ, programs, _warn):
            case There(program, variables, directory):
                programs.become(*program, variables=variables, directory=directory)
            case Here(variables, status):
                os.environ.update(variables)
                _here(status)
    except ControllerError as error:
        _warn(f"pierhead: {error}")
        sys.exit(error.exit_code)


def decide(
    words: Sequence[str],
    start: Path,
    environment: Mapping[str, str],
    programs: Programs,
    warn: Callable[[str], None],
) -> Here | There:
    """Where a command that is typed in the directory `start` runs. Raises ControllerError and its kinds."""
    command, first_two = next(iter(words), "--help"), " ".join(words[:2])
    asks = "_PIERHEAD_COMPLETE" in environment  # a shell, for completions
    if command in handover.COMMANDS and not asks:
        return There((str(handover.interpreter(start, environment)), "-m", "pierhead", *words))
    own_words = words[:2] if command == "exec" else words  # what follows is the command that runs in the replica
    if not asks and (command in (*HERE, "--version") or {"--help", "-h"} & set(own_words)):
        return Here()
    if first_two in OF_THE_MACHINE:
        return There(OF_NODES.program(*words))
    needs_none = command in WITHOUT_A_STACK or first_two in WITHOUT_A_STACK
    try:
        project = find(start, environment)
    except NoProject:
        if is_known(command) and not (needs_none or asks or environment.get("PIERHEAD_API_URL")):
            raise
        return Here()
    if asks and project.is_clone and not stack_files.is_from(project.root):
        return Here({"PIERHEAD_API_URL": _NOWHERE})
    try:
        return _in_project(words, ProjectStack(project, environment, programs), warn, asks=asks, needs_none=needs_none)
    except NoStack as error:
        if command not in ALSO_WITHOUT_AN_API:
            raise
        return Here({"PIERHEAD_PROJECT_DIR": str(project.root), NO_API: str(error)})


_NOWHERE = "http://127.0.0.1:9"
"""Where no API answers: a shell gets no completions."""


def _in_project(
    words: Sequence[str], stack: ProjectStack, warn: Callable[[str], None], *, asks: bool, needs_none: bool
) -> Here | There:
    command, project = words[0] if words else "--help", stack.project
    _refuse_missing_names(words, stack)
    own = {"PIERHEAD_PROJECT_DIR": stack.environment.get("PIERHEAD_PROJECT_DIR") or str(project.root)}
    if stack.environment.get("PIERHEAD_API_URL"):
        return Here(own)
    if not project.is_clone and not stack_files.written_build(project.root):
        if needs_none or asks or not is_known(command):
            return Here(own)
        raise NoStack(f"the stack of {project.root} does not run. Start it with: pierhead up")
    is_tools_own = project.is_clone or asks or _tell_another_build(project, warn)
    reads_files = {**own, "COMPOSE_FILE": stack.files, "COMPOSE_PROJECT_NAME": stack.name}
    if program := stack.engine.program(*words):
        return Here(reads_files) if needs_none else There(program)
    if command == "logs" and (named := _own_services_in(words, stack)):
        logs = ("docker", "compose", "logs", "--tail", LOG_LINES, *named)
        return There(logs, {"COMPOSE_FILE": stack.files}, project.root)
    controller = stack.controller()
    elsewhere = controller is not None and stack.is_elsewhere(controller.directory)
    if controller is not None and elsewhere and not (asks or needs_none):
        warn(stack.about_another(started_from(controller.directory)))
    status = 0
    if controller is not None and not (asks or elsewhere):
        status = _cover_what_runs(words, stack, controller, warn)
    if needs_none:
        return Here(reads_files, status)
    kind = {"PIERHEAD_OWN_STACK": stack.kind} if is_tools_own and not elsewhere else {}
    return Here({**own, **kind, **_addresses(stack, controller, asks=asks, command=command)})


def _own_services_in(words: Sequence[str], stack: ProjectStack) -> Sequence[str]:
    """The words for Compose, where the logs of the stack's own services are asked for; else none.

    Raises InvalidRequest for an option of services with x-serve.
    """
    if len(words) == 1:
        return stack.own_services[:3]
    service = words[-1] if words[1].startswith("-") else words[1]
    if service not in stack.own_services:
        return ()
    for option in ("--grep", "--replica"):
        if any(word.partition("=")[0] == option for word in words):
            raise InvalidRequest(
                f"{option} is for services with x-serve; for the stack's own services type: "
                f"docker compose logs {service} | grep PATTERN"
            )
    return words[1:]


def _tell_another_build(project: Project, warn: Callable[[str], None]) -> bool:
    """Whether the project was brought up by this build of the tool; otherwise it says so."""
    written, installed = stack_files.written_build(project.root), stack_files.build()
    if written != installed:
        warn(
            f"pierhead: {project.root} was brought up by another build of this tool ({written}; this is {installed}); "
            "`pierhead up` brings both together"
        )
    return written == installed


def _addresses(
    stack: ProjectStack, controller: ControllerContainer | None, *, asks: bool, command: str
) -> Mapping[str, str]:
    """Where the API is. Raises NoStack where no controller is to be seen."""
    is_down = controller is None and stack.engine_answers()
    # The API's socket is this machine's, and the engine's stack may be another one of that name.
    elsewhere = not (stack.environment.get("DOCKER_HOST") or "unix:").startswith("unix:")
    is_for_browsers = command == "console"
    lets_in = not (is_down or elsewhere or is_for_browsers) and stack.programs.listens(stack.api_socket)
    api = stack.api_socket if lets_in else controller.api if controller else ""
    if not api and not asks and is_known(command):
        if controller is not None or is_down:
            raise NoStack(
                f'the controller of the stack "{stack.name}" is not running. Start it with: {stack.typed("up")}'
                if controller is None
                else f"the controller's API has no port on this machine ({stack.name}); set PIERHEAD_API_URL"
            )
        api = f"http://127.0.0.1:{stack.setting('PIERHEAD_API_PORT', '8100')}"
        if not stack.programs.listens(api):
            host = stack.environment.get("DOCKER_HOST")
            raise NoStack(
                f"the Docker Engine does not answer{f' at {host}' if host else ''}, so it is not known what runs. "
                f"Start it with: {stack.typed('up')}"
            )
    token = "" if lets_in else stack.setting("PIERHEAD_API_TOKEN")
    return {
        **({"PIERHEAD_API_TOKEN": token} if token else {}),
        "PIERHEAD_API_URL": api or _NOWHERE,
    }


def _cover_what_runs(
    words: Sequence[str], stack: ProjectStack, controller: ControllerContainer, warn: Callable[[str], None]
) -> int:
    """A deployment, or a check of all files, says where the running stack's files are others than those that are named;
    a check then reads the running stack's as well. Returns the exit status of that check.
    """
    checks_all = words[0] == "validate" and (len(words) == 1 or words[1].startswith(("-o", "--output")))
    if words[0] != "deploy" and not checks_all:
        return 0
    if not (told := stack.difference(stack.running_files(controller))):
        return 0
    warn(told)
    if not checks_all:
        return 0
    warn("The running stack's files:")
    done = stack.programs.read("docker", "exec", controller.id, "pierhead", "validate", timeout_s=60)
    warn((done.output + done.errors).rstrip())
    warn("The files that COMPOSE_FILE names:")
    return done.status


def _refuse_missing_names(words: Sequence[str], stack: ProjectStack) -> None:
    """Raises InvalidRequest for the empty words that make hands over for what was not given."""
    command = words[0] if words else ""
    if command not in EXAMPLES or "" not in words[1:3]:
        return
    what = "name a service and a number of replicas, or auto" if command == "scale" else "name a service"
    raise InvalidRequest(f"{command}: {what}. Example: {stack.typed(*EXAMPLES[command])}")


def is_known(command: str) -> bool:
    """Whether the command line has this command: a word that it does not have gets its answer."""
    from typer.main import get_command

    from .app import app

    return command in getattr(get_command(app), "commands", ())


def _here(status: int) -> None:
    from .app import main as run

    try:
        run()
    except SystemExit as ended:
        sys.exit(ended.code or status)


def _warn(words: str) -> None:
    from .output import complain

    complain(words)
