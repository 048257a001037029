"""Waiting for a state of the world, the only way tests wait: look, look again, and say what was last seen."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_S = 30.0
"""How long a test waits for what comes at once on a quiet machine. It says nothing of how soon that has to come: it is
there against what never comes, and a machine that is busy for seconds fails no test.
"""


def eventually(look: Callable[[], T], what: str, within_s: float = 60.0, every_s: float = 0.05) -> T:
    """Return the first true thing that `look` returns; fail with `what` and the last look after `within_s` seconds.

    Errors of `look` (a server that is not there yet) count as a false look and are shown if they are the last one.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            seen: object = look()
        except Exception as error:
            seen = error
        else:
            if seen:
                return seen  # type: ignore[return-value]
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {seen!r}")
        time.sleep(every_s)


def seconds_until(look: Callable[[], object], what: str, within_s: float = 60.0) -> float:
    """Return how long it took until `look` returned something true."""
    started = time.monotonic()
    eventually(look, what, within_s, every_s=0.01)
    return time.monotonic() - started


async def until(look: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> Any:
    """Return the first true thing that `look` returns, which may be a coroutine function; its errors are the test's."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                seen = look()
                if inspect.isawaitable(seen):
                    seen = await seen
                if seen:
                    return seen
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None
