from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import ClientSession, ClientTimeout
from pierhead import close_handles

from tests.harness import ports
from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.fake_transport import FakeService, Make
from tests.unit.runtime.harness import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Starts replicas, and ends them and every connection to them after the test."""
    made = Cluster()
    yield made
    await close_handles()
    await made.close()


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes the replicas r0, r1, ... of a service over a transport in memory."""
    yield lambda replicas=1, **settings: FakeService(monkeypatch, replicas, **settings)
    await close_handles()


@pytest.fixture
async def client() -> AsyncIterator[ClientSession]:
    """An HTTP client whose requests do not wait forever."""
    async with ClientSession(timeout=ClientTimeout(total=PATIENCE_S)) as session:
        yield session


@pytest.fixture(params=["known", "unknown"])
def aiohttp_version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The installed aiohttp, and one that the runtime does not know: then nothing can import its private parts."""
    version = str(request.param)
    if version == "unknown":
        make_unknown(monkeypatch)
    return version


def make_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the installed aiohttp taken for a version that the runtime does not know."""
    monkeypatch.setattr(aiohttp, "__version__", "99.0.0")
    monkeypatch.delattr("pierhead.http.inside", raising=False)
    monkeypatch.setitem(sys.modules, "pierhead.http.inside", None)


@pytest.fixture
def free_port() -> int:
    """See tests/harness/ports.py."""
    return ports.free_port()
