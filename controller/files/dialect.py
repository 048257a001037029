"""What compose files mean for an engine of several nodes, where it is not what they mean for that of one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pierhead.serve_block import ServeBlock

    from ..model.spec import GpuRequest
    from .problems import Problems, ServiceSource

    Read = Callable[[ServiceSource, str, Any, dict[str, Any], Problems], None]
    """(service, path of a key, its value, body, problems): puts a key of Compose into the body of the create call."""

OF_NO_CONTAINER = "is for Swarm, Compose and Pierhead do not use it; remove it"
"""The problem of a key of `deploy` that no dialect has."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the files are read for such an engine."""

    check: Callable[[ServiceSource, ServeBlock | None, GpuRequest | None, Problems], None]
    """Adds a problem for everything in a service that its replicas could not have."""
    files: Callable[[ServiceSource, Problems], Mapping[str, Any]]
    """A service's secrets and configs -> what the body has for them; on one machine they are mounts."""
    deploy: Mapping[str, Read]
    """Keys of `deploy` that only this engine has."""
    reservations: Mapping[str, Read]
    """Keys of `deploy.resources.reservations` that only this engine has."""
