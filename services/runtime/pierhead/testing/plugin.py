"""pytest's plugin, which comes with the package: `async def` tests, and the fixture `pierhead_stack`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from pierhead.testing.stack import Stack


@pytest.hookimpl
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in an event loop of its own. Tests of pytest-asyncio and anyio are theirs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters.keys() & pyfuncitem.funcargs.keys()
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def pierhead_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The stack of compose.yaml in pytest's root directory, started once for all tests that use it."""
    with Stack(request.config.rootpath / "compose.yaml") as stack:
        yield stack
