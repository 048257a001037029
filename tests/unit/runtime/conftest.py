from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path

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
    """A loopback port that nobody listens on. It is below those that the kernel gives out: none takes it meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(lowest // 2, lowest), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):  # somebody has it: the next one
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"100 ports from {lowest // 2} to {lowest} are all taken")


@pytest.fixture
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What handles use in this test; see EACH_TRANSPORT."""
    chosen = str(request.param)
    monkeypatch.setattr(harness, "TRANSPORT", chosen)
    return chosen
