"""Words of .env for the whole stack, which Compose puts into the environment of the controller's service. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .problems import Problems, at


class StackOptions:
    """The variables of the controller's service, in files that contain it."""

    def __init__(self, definitions: Mapping[Any, Any], controller: str, problems: Problems) -> None:
        definition = definitions.get(controller)
        environment = definition.get("environment") if isinstance(definition, Mapping) else None
        self._environment = environment if isinstance(environment, Mapping) else {}
        self._path = at(at("services", controller), "environment")
        self._problems = problems

    def get(self, variable: str) -> Any:
        """What is written; None where nothing is."""
        return self._environment.get(variable)

    def expected(self, variable: str, expectation: str, found: object) -> None:
        """Add the problem that a word is not as expected."""
        self._problems.expected(at(self._path, variable), f"{expectation} (it is set in .env)", found)
