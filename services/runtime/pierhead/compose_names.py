"""Names that Compose gives by itself: the files that it looks for, and the image of a service whose files name none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

DEFAULT_NAMES: Final = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
"""In the order in which Compose looks for them."""


def image_name(project: str, service: str, definition: Mapping[str, Any]) -> str:
    """The image of a service that has an `image` or a `build`."""
    return str(definition.get("image") or f"{project}-{service}")
