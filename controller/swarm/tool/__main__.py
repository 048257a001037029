"""`python -m controller.swarm.tool COMMAND...`: what a user types about a node, or about a stack on a Swarm.

`stack refuse|check|up|trouble` and `stack services|answers|log|is-down`: the parts of `pierhead up` that are Swarm's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pierhead.interrupt import INTERRUPTED

from ...errors import ControllerError
from ...tool.project import stack_files
from ...tool.project.programs import Programs
from ...tool.project.project import NoProject, find
from ...tool.project.stack import ProjectStack
from ...tool.project.steps import say
from ..nodes import options
from ..nodes.machine import NodeMachine
from ..nodes.membership import Membership
from ..up.services import OWN
from .stack import SwarmStack

LOGS = ("haproxy", "controller", "prometheus")
LOG_LINES = "200"


def run(words: list[str], programs: Programs) -> int:
    """Carry a command out; its exit status. Raises ControllerError."""
    match words:
        case ["node", "init" | "join" | "token", *_]:
            _membership(words[1:], programs)
            return 0
    stack = ProjectStack(find(Path.cwd()), os.environ, programs)
    on_swarm = SwarmStack(stack)
    match words:
        case ["stack", "refuse"]:
            on_swarm.refuse()
            return 0
        case ["stack", "answers"]:
            return 0 if on_swarm.answers() else 1
        case ["stack", "services" | "log" | "is-down" as question]:
            say(on_swarm.told(question))
            return 0
        case ["stack", command]:
            return on_swarm.run(command)
        case ["down", *flags]:
            return on_swarm.run("down", volumes="--volumes" in flags, force="--force" in flags)
        case ["console"]:
            return stack.programs.call(*on_swarm.console(), variables={})
        case ["logs"]:
            return _logs(stack, *LOGS)
        case ["logs", service] if service in OWN:
            return _logs(stack, service)
        case _:
            return _beside(on_swarm, words)


def _membership(words: list[str], programs: Programs) -> None:
    """`node init`, `node join` and `node token`. They need no project."""
    plain, given = options.read(words)
    project, registry = "pierhead", os.environ.get("PIERHEAD_REGISTRY", "")
    try:
        stack = ProjectStack(find(Path.cwd()), os.environ, programs)
        project, registry = stack.name, stack.setting("PIERHEAD_REGISTRY")
    except NoProject:
        pass
    machine = NodeMachine(programs, stack_files.machine_scripts() / "engine.sh")
    typed = "./pierhead" if os.environ.get("PIERHEAD_CLONE") else "pierhead"
    try:
        Membership(machine, given, say, _warn, typed, project, registry == "here").run(plain)
    except KeyboardInterrupt:
        _warn("Interrupted. Repeat the command to continue.")
        raise


def _logs(stack: ProjectStack, *services: str) -> int:
    """The last lines of the stack's own services."""
    for service in services:
        stack.programs.call("docker", "service", "logs", "--tail", LOG_LINES, f"{stack.name}_{service}", variables={})
    return 0


def _beside(on_swarm: SwarmStack, words: list[str]) -> int:
    """Become the command, next to the controller. A deployment first stores what files and images say now."""
    if words[:1] == ["deploy"] and (status := on_swarm.run("files")):
        return status
    is_asked = "_PIERHEAD_COMPLETE" in os.environ  # a shell, for completions
    if not is_asked:
        on_swarm.tell_differences(_warn, is_status=words[:1] == ["status"])
    try:
        program, variables = on_swarm.next_to_controller(*words)
    except ControllerError:
        if is_asked:
            return 0
        raise
    if sys.stdin.isatty() and sys.stdout.isatty():
        program[2:2] = ["--interactive", "--tty"]
    return on_swarm.stack.programs.become(*program, variables=variables, directory=None)


def main() -> int:
    """Return the exit status."""
    try:
        return run(sys.argv[1:], Programs())
    except ControllerError as error:
        _warn(f"pierhead: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _warn(words: str) -> None:
    sys.stderr.write(f"{words}\n")


if __name__ == "__main__":
    sys.exit(main())
