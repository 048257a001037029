"""Names that Compose gives by default: the files that it looks for, and the image of a service whose files name none.
And the names of the stack's own services.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

DEFAULT_NAMES: Final = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
"""In the order in which Compose looks for them."""

RESERVED: Final[Mapping[str, tuple[str, ...]]] = {
    "docker": ("haproxy", "controller", "prometheus"),
    "swarm": ("haproxy", "controller", "prometheus", "registry"),
}
"""By engine, the services of the stack that no service of the user's may have the name of."""


def image_name(project: str, service: str, definition: Mapping[str, Any]) -> str:
    """The image of a service that has an `image` or a `build`."""
    return str(definition.get("image") or f"{project}-{service}")


def own_image(name: str) -> str:
    """The image that the project builds of an application: another project on the machine may have an `app` too."""
    return "${COMPOSE_PROJECT_NAME}-" + (re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") or "app")
