"""The engines that a project may name in PIERHEAD_ENGINE, as far as the tool knows them; only this module names one."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path


class ProjectEngine(StrEnum):
    """By the value of PIERHEAD_ENGINE."""

    DOCKER = "docker"
    SWARM = "swarm"

    @property
    def stack_file(self) -> str:
        """The stack's own compose file, in the clone's compose/."""
        return "compose.yaml" if self is ProjectEngine.DOCKER else "swarm.yaml"

    @property
    def included_as(self) -> str:
        """The file of `.pierhead/` that includes it."""
        return "stack.yaml" if self is ProjectEngine.DOCKER else "swarm.yaml"

    @property
    def has_own_reader(self) -> bool:
        """Whether its program reads the compose files, since they mean other things there."""
        return self is ProjectEngine.SWARM

    def program(self, *words: str) -> tuple[str, ...]:
        """The command line of the program that knows this engine; () where the tool itself does."""
        return () if self is ProjectEngine.DOCKER else own_program("controller.swarm.tool", *words)


def own_program(module: str, *words: str) -> tuple[str, ...]:
    """The command line of a module of this installation.

    -P: what is in the directory that it is typed in must not be taken for modules.
    """
    root = str(Path(__file__).resolve().parents[3])
    code = f"import runpy, sys; sys.path.insert(0, {root!r}); runpy.run_module({module!r}, run_name='__main__')"
    return (sys.executable, "-P", "-c", code, *words)


OF_NODES = ProjectEngine.SWARM
"""Its program makes machines nodes, in a project or in none."""
NO_WATCH = "--watch is for one machine: on a Swarm, images go through a registry. Nothing was changed."
