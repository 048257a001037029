"""Which event loop a test runs on, and what it may not leave to the next one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest
from pierhead.multiplex_held import HELD
from pierhead.routing_stats import NOTHING, STATS
from pierhead.starting import START

from tests.harness.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The virtual one for tests marked so: their waits cost nothing, however long or short they are."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """What a process tells of its start and its work is one for the whole process, and so is where its modules are: a
    controller puts the project's directory last.
    """
    path = sys.path[:]
    yield
    sys.path[:] = path
    STATS.numbers, STATS.version, STATS._text = NOTHING, 0, (0, "")
    START.words, START.steps, START._served = "", 0, False
    START._best.clear()
    HELD.version, HELD.text = 0, ""
    HELD._counts.clear()
