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
    https_port: int = 0
    """PIERHEAD_HTTPS_PORT; 0 = clients come without TLS."""
    tls_dir: str = ""
    """The directory of the project with the certificates for clients (PIERHEAD_TLS_DIR); "" = none are needed."""
    jwt_dir: str = ""
    """That with the public keys of clients' tokens (PIERHEAD_JWT_DIR)."""
    jwt_algorithm: str = ""
    """By which these tokens are signed (PIERHEAD_JWT_ALGORITHM)."""
    files: str = ""
    """COMPOSE_FILE."""
    files_digest: str = ""
    """Of what these files say (PIERHEAD_FILES_DIGEST)."""
    has_force: bool = False
    """Remove another clone's stack, too (FORCE)."""
    has_volumes: bool = False
    """Remove the volumes, too (VOLUMES)."""
