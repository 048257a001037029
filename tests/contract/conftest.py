"""What several contract suites share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.haproxy_container import build, docker


@pytest.fixture(scope="session")
def haproxy_image() -> Iterator[str]:
    """HAProxy's image, built from this checkout; its layers stay in the builder's cache."""
    image = build()
    yield image
    docker("rmi", "--force", image)
