"""What a Swarm's API calls things: labels, bounds, and the name and address of a node in its lists. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STACK_LABEL = "com.docker.stack.namespace"
"""Of everything that `docker stack deploy` makes."""
LONGEST_NAME = 64
"""Of a secret or config, in characters."""

Json = Mapping[str, Any]


def node_name(node: Json) -> str:
    """Its hostname; its id until it has told one."""
    return str((node.get("Description") or {}).get("Hostname") or node["ID"])


def node_address(node: Json) -> str:
    """Where the other nodes reach it. A manager's own entry says 0.0.0.0 in its status."""
    manager = str((node.get("ManagerStatus") or {}).get("Addr") or "").rpartition(":")[0]
    return manager or str((node.get("Status") or {}).get("Addr") or "")
