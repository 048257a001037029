"""The compose files that are found without being named."""

from __future__ import annotations

from typing import Final

DEFAULT_NAMES: Final = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
"""In the order in which Compose looks for them."""
