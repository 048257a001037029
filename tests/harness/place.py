"""Where a stack runs, and what a user can do there: type commands in the clone, and send requests to an edge.

`OneMachine` is this machine's own engine; a Swarm is swarm_stack.py.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from typing import Any

from tests.harness.commands import Ended, run
from tests.harness.haproxy_container import docker
from tests.harness.stack import PORTS, ROOT, Answer, free_ports, request
from tests.harness.waiting import eventually

TAG = os.environ.get("PIERHEAD_TAG", "latest")
COMMAND_S = 600.0
QUIET_WITHIN_S = 240.0


class Place(ABC):
    """See the module. Commands get `variables`, as .env would give them."""

    def __init__(self, project: str, files: str) -> None:
        """`files`: a COMPOSE_FILE."""
        self.project = project
        self.variables = {
            "PIERHEAD_TAG": TAG,
            "PIERHEAD_BUILD": "0",
            "COMPOSE_PROJECT_NAME": project,
            "COMPOSE_FILE": files,
            "COMPOSE_PROFILES": "",
        }

    @property
    @abstractmethod
    def edges(self) -> list[str]:
        """The addresses at which requests are answered: http://host:port."""

    @abstractmethod
    def type(self, *command: str, **more: str) -> Ended:
        """Run a command in the clone, where a user types."""

    @abstractmethod
    def ids(self) -> set[str]:
        """Of the running replicas and the stack's own services: a restarted one has another id."""

    @abstractmethod
    def left(self) -> list[str]:
        """Everything that is there of the stack, in whatever state."""

    def is_gone(self) -> bool:
        """Whether nothing is there of the stack. Raises AssertionError with what is."""
        found = self.left()
        assert not found, found
        return True

    def run(self, *words: str, **more: str) -> Ended:
        """A command of the clone's, also where it fails."""
        return self.type("./pierhead", *words, **more)

    def make(self, *words: str, **more: str) -> str:
        """The same, where it must succeed."""
        done = self.run(*words, **more)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def control(self, *arguments: str) -> Any:
        """The JSON document that a command of the program prints."""
        return json.loads(self.make(*arguments, "--output", "json"))

    def ask(self, path: str) -> Answer:
        """What a client gets at the first edge."""
        return request(self.edges[0] + path)

    def story(self, lines: int = 60) -> str:
        """The last events."""
        return "\n".join(self.make("events").splitlines()[-lines:])

    def services(self) -> dict[str, Any]:
        """The rows of the services, by name."""
        return {row["name"]: row for row in self.control("status")["services"]}

    def replicas(self) -> dict[str, Any]:
        """The replicas that the controller knows, by name."""
        return {one["name"]: one for row in self.services().values() for one in row["replicas"] if one["name"]}

    def is_quiet(self) -> bool:
        """Whether nothing is to do, and every replica that is wanted serves."""
        plan = self.control("plan")
        rows = self.services().values()
        has_all = all(row["ready"] == row["wanted"] == len(row["replicas"]) for row in rows)
        return not plan["steps"] and not plan["pending"] and has_all

    def settle(self, within_s: float = QUIET_WITHIN_S) -> float:
        """Wait until nothing is to do; return how many seconds that took."""
        began = time.monotonic()
        eventually(self.is_quiet, "nothing is to do", within_s, every_s=1.0)
        return time.monotonic() - began


class OneMachine(Place):
    """This machine, with ports of its own."""

    def __init__(self, project: str, files: str) -> None:
        super().__init__(project, files)
        self.variables |= {name: str(port) for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)}
        self._mine = f"label=com.docker.compose.project={project}"

    @property
    def edges(self) -> list[str]:
        return [f"http://127.0.0.1:{self.variables['PIERHEAD_HTTP_PORT']}"]

    def type(self, *command: str, **more: str) -> Ended:
        return run(command, COMMAND_S, ROOT, {**os.environ, **self.variables, **more})

    def ids(self) -> set[str]:
        return set(docker("ps", "--quiet", "--no-trunc", "--filter", self._mine).split())

    def left(self) -> list[str]:
        found = [docker("ps", "--all", "--filter", self._mine, "--format", "{{.Names}} {{.Status}}")]
        found += [docker(kind, "ls", "--filter", self._mine, "--format", "{{.Name}}") for kind in ("network", "volume")]
        return [line for lines in found for line in lines.splitlines()]
