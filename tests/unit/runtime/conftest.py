from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from pierhead import close_handles

from tests.harness import ports
from tests.unit.runtime import harness
from tests.unit.runtime.harness import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Starts replicas, and ends them and every connection to them after the test."""
    made = Cluster()
    yield made
    await close_handles()
    await made.close()


@pytest.fixture
def free_port() -> int:
    """See tests/harness/ports.py."""
    return ports.free_port()


@pytest.fixture
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What handles use in this test; see EACH_TRANSPORT."""
    chosen = str(request.param)
    monkeypatch.setattr(harness, "TRANSPORT", chosen)
    return chosen
