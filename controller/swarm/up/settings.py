"""The input of `make up` and `make down` of a stack on a Swarm: the tool writes it as JSON into one variable. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "PIERHEAD_STACK"
FILES_LABEL, DIGEST_LABEL = "pierhead.files", "pierhead.files-digest"
"""Of the stored compose files: where the clone has them, and what they said."""
CLONE_LABEL = "pierhead.clone"
"""Of every service of the stack: the directory that `make up` was typed in."""


@dataclass(frozen=True, slots=True)
class StackSettings:
    """All settings."""

    project: str
    """COMPOSE_PROJECT_NAME, which is also the name of the stack."""
    clone: str
    """The clone's directory (PIERHEAD_PROJECT_DIR)."""
    registry: str = ""
    """host:port[/path], or "here" for one of the stack's own on this node (PIERHEAD_REGISTRY); "" = none."""
    profiles: Sequence[str] = ()
    """COMPOSE_PROFILES."""
    http_port: int = 8000
    grpc_port: int = 9000
    files: str = ""
    """COMPOSE_FILE."""
    files_digest: str = ""
    """Of what these files say (PIERHEAD_FILES_DIGEST)."""
    has_force: bool = False
    """Remove another clone's stack, too (FORCE)."""
    has_volumes: bool = False
    """Remove the volumes, too (VOLUMES)."""
