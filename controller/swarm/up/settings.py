"""What `make up` and `make down` of a stack on a Swarm are told, by variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StackSettings:
    """All settings."""

    project: str
    """COMPOSE_PROJECT_NAME, which is also the name of the stack."""
    clone: str
    """The clone's directory (PIERHEAD_PROJECT_DIR)."""
    registry: str = ""
    """host:port[/path], or "here" for one of the stack's own on this node (PIERHEAD_REGISTRY); "" = none."""
    profiles: frozenset[str] = frozenset()
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

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> StackSettings:
        """Read them as the scripts in compose/machine/ have written them."""
        return cls(
            project=env.get("COMPOSE_PROJECT_NAME") or "pierhead",
            clone=env.get("PIERHEAD_PROJECT_DIR", ""),
            registry=env.get("PIERHEAD_REGISTRY", ""),
            profiles=frozenset(filter(None, env.get("COMPOSE_PROFILES", "").split(","))),
            http_port=int(env.get("PIERHEAD_HTTP_PORT") or 8000),
            grpc_port=int(env.get("PIERHEAD_GRPC_PORT") or 9000),
            files=env.get("COMPOSE_FILE", ""),
            files_digest=env.get("PIERHEAD_FILES_DIGEST", ""),
            has_force=env.get("FORCE") == "1",
            has_volumes=env.get("VOLUMES") == "1",
        )
