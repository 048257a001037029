"""`docker compose` for the files of a stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ...errors import InvalidRequest
from ...files.traces import TRACE_VARIABLES
from ...files.yaml import load_resolved
from .programs import Done
from .resolved import Services
from .stack import ProjectStack

READ_S = 60.0


@dataclass(frozen=True)
class Compose:
    """See the module. `variables` are put over those of COMPOSE_FILE and of the shell."""

    stack: ProjectStack
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> str:
        """The COMPOSE_FILE."""
        return self.variables.get("COMPOSE_FILE") or self.stack.files

    def setting(self, name: str, default: str = "") -> str:
        """What Compose takes for a variable."""
        return self.variables[name] if name in self.variables else self.stack.setting(name, default)

    @property
    def profiles(self) -> list[str]:
        """Those that COMPOSE_PROFILES names."""
        return [name for each in self.setting("COMPOSE_PROFILES").split(",") if (name := each.strip())]

    def having(self, **variables: str) -> Compose:
        """The same with other variables."""
        return Compose(self.stack, {**self.variables, **variables})

    @property
    def own(self) -> Mapping[str, str]:
        """The variables of a program that reads the same files, and asks this stack's API, whatever the shell names. Of
        OpenTelemetry's variables those of `.env` count: a shell has them for its own programs.
        """
        traces = {name: self.stack.written(name) for name in TRACE_VARIABLES if name in self.stack.environment}
        return {"COMPOSE_FILE": self.stack.files, "PIERHEAD_API_URL": "", **traces, **self.variables}

    def read(self, *words: str) -> Done:
        """Run it, and return what it printed."""
        return self.stack.programs.read(
            "docker", "compose", *words, timeout_s=READ_S, variables=self.own, directory=self.stack.root
        )

    def step(self, text: str, *words: str) -> bool:
        """Run it as a step; whether it succeeded."""
        return self.stack.programs.step(
            text, "docker", "compose", *words, variables=self.own, directory=self.stack.root
        )

    def config(self, *options: str) -> Mapping[str, Any]:
        """What Compose makes of the files. Raises InvalidRequest."""
        done = self.read(*options, "config")
        if done.status != 0:
            said = done.errors.strip()
            raise InvalidRequest(
                f"Compose cannot read the stack's files ({self.files.replace(':', ', ')}): {said}\n"
                "Nothing was built or started."
            )
        try:
            config: Mapping[str, Any] = load_resolved(done.output) or {}
        except yaml.YAMLError as error:
            raise InvalidRequest(f"`docker compose config` printed what is not YAML: {error}") from None
        return config

    def services(self, *options: str) -> Services:
        """The services of the chosen profiles, or of those that the options choose. Raises InvalidRequest."""
        services: Services = self.config(*options).get("services") or {}
        return services

    def every_service(self) -> Services:
        """Those of all profiles. Raises InvalidRequest."""
        return self.services("--profile", "*")
