"""A stack on the nodes of an engine that has a program of its own: its parts of an `up` are that program's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InvalidRequest
from .compose import Compose
from .engines import ProjectEngine
from .images import NotBuilt
from .programs import Done, Told
from .resolved import Services
from .stack import NotUp, ProjectStack

ANSWER_S = 60.0


@dataclass(frozen=True)
class OnNodes:
    """It has the methods of `OnMachine`."""

    stack: ProjectStack
    engine: ProjectEngine

    def refuse(self, compose: Compose, services: Services) -> None:
        """Raise Told for what is in the way. What needs the controller's image, `prepare` checks."""
        if status := self._call("refuse", compose):
            raise Told(status)

    def prepare(self, compose: Compose, *, builds: bool) -> Compose:
        """The registry where the stack has one, and the controller's check. Raises InvalidRequest, NotBuilt."""
        compose = compose.having(COMPOSE_PROFILES=self.stack.profiles)
        text = "Building the controller"
        if builds and not compose.step(text, "--progress", "plain", "build", "controller"):
            raise NotBuilt(
                "the controller's image could not be built; the lines above say why. Running services are not affected."
            )
        if self._call("check", compose):
            raise InvalidRequest("Nothing was started; running services are not affected.")
        return compose

    def replicated(self) -> Sequence[str]:
        """The services that have replicas now."""
        return self._ask("services").lines

    def start(self, compose: Compose) -> None:
        """Start the stack. Raises InvalidRequest, NotUp."""
        if self._call("up", compose):
            raise NotUp("the stack was not started; the lines above say why.")

    def missing_of_controller(self) -> str:
        """Why the controller cannot be asked yet; "" where it can."""
        return "no controller answers" if self._ask("answers").status else ""

    def controllers_log(self, compose: Compose) -> str:
        """The end of it."""
        return self._ask("log").output

    def is_down(self) -> bool:
        """Whether the stack is removed, or on its way."""
        return self._ask("is-down").output.strip() == "yes"

    def addresses(self, compose: Compose) -> Sequence[tuple[str, str]]:
        """What answers in addition to services, and where."""
        return [("and the same", "at every other node"), ("console", self.stack.typed("console"))]

    def who_reaches_it(self) -> str:
        """Nothing: the ports are on every address of each node."""
        return ""

    def tell_trouble(self, compose: Compose) -> None:
        """Say what is wrong although the stack answers."""
        self._call("trouble", compose)

    def _call(self, command: str, compose: Compose) -> int:
        # Without COMPOSE_PROFILES: the program adds the profiles of the stack's own services itself.
        words = self.engine.program("stack", command)
        return self.stack.programs.call(
            *words, variables={"COMPOSE_FILE": compose.files}, given="", directory=self.stack.root
        )

    def _ask(self, command: str) -> Done:
        words = self.engine.program("stack", command)
        return self.stack.programs.read(
            *words, timeout_s=ANSWER_S, variables={"COMPOSE_FILE": self.stack.files}, directory=self.stack.root
        )
