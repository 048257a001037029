"""The image that tests run plain containers from: one of the base images, so that no registry is asked."""

from __future__ import annotations

import docker.errors
import pytest
from docker import APIClient

CANDIDATES = ("debian:trixie-slim", "debian:bookworm-slim")


def debian_image(client: APIClient) -> str:
    """A Debian image that is on this machine; skips the test where compose/machine/base-images.sh has not run."""
    for image in CANDIDATES:
        try:
            client.inspect_image(image)  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound:
            continue
        return image
    pytest.skip(f"none of {', '.join(CANDIDATES)} is on this machine: run compose/machine/base-images.sh")
