from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from pierhead import close_handles

from tests.unit.runtime.harness import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Starts replicas, and ends them and every connection to them after the test."""
    made = Cluster()
    yield made
    await close_handles()
    await made.close()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
