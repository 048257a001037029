"""pytest's fixtures: `pytest_plugins = ["pierhead.testing.fixtures"]` in conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pierhead.testing.stack import Stack


@pytest.fixture(scope="session")
def pierhead_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The stack of compose.yaml in pytest's root directory, started once for all tests that use it."""
    with Stack(request.config.rootpath / "compose.yaml") as stack:
        yield stack
