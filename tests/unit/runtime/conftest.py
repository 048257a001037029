from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
from pierhead import close_handles

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
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What handles use in this test; see EACH_TRANSPORT."""
    chosen = str(request.param)
    monkeypatch.setattr(harness, "TRANSPORT", chosen)
    return chosen
