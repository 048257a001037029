"""Which event loop a test runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.harness.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The virtual one for tests marked so: their waits cost nothing, however long or short they are."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualLoop}
    return {"real": asyncio.new_event_loop}
