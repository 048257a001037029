"""One service as the translation to the engine's create call sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.problems import at


@dataclass(frozen=True)
class ServiceSource:
    """One service as Compose resolved it, with the top-level sections that it refers to."""

    project: str
    name: str
    definition: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`networks`, `volumes`, `secrets`, `configs`: Compose's names to their definitions."""
    control_networks: frozenset[str] | None = None
    """Networks (Compose's names) of the controller; None = it is not part of these files."""

    @property
    def path(self) -> str:
        """Where messages about this service start."""
        return at("services", self.name)
