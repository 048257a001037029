from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.faults.processes import Fleet


@pytest.fixture(autouse=True)
def no_pauses_of_our_own() -> Iterator[None]:
    """The load comes from this process. A search for garbage, of which thousands of tests have left much, would take
    tenths of a second and count as the replicas' latency, so there is none during the test.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Starts processes, and ends them after the test."""
    async with Fleet(tmp_path) as made:
        yield made
