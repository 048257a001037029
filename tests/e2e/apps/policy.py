"""An autoscaling function, as a project has it. The controller imports it from the project's directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controller.desired.autoscale import Situation


def wanted(situation: Situation, replicas: int) -> int:
    """Always the same number, within what the service may have."""
    return min(replicas, situation.spec.max)
