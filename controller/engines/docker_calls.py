"""Runs docker-py's blocking calls in a few threads, each with a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..errors import EngineError, EngineUnreachable
from .docker_errors import Hints, translated

T = TypeVar("T")

# Longer than the timeout of one HTTP call, because an action may make several.
_CALL_TIMEOUT_S = 75.0
_LOOK_TIMEOUT_S = 45.0
_PULL_TIMEOUT_S = 3600.0
# Shorter than the command's own timeout for an answer of the API.
_LOGS_TIMEOUT_S = 30.0
_LONGEST_LOG = 64 * 1024
# Reads in progress or waiting for a thread: more than any service has replicas.
_MOST_LOG_READS = 1000


class EngineCalls:
    """Thread pools for calls that must not wait for others, or that others must not wait for.

    `call`, `stop`, `look`, `pull` and `read_log` raise ControllerErrors. A cancelled call still runs in its thread.
    """

    def __init__(self, hints: Hints = ()) -> None:
        """`hints`: what to do about messages that only this engine has."""
        self._hints = hints
        self._calls = ThreadPoolExecutor(max_workers=8, thread_name_prefix="pierhead-engine")
        self._stops = ThreadPoolExecutor(max_workers=8, thread_name_prefix="pierhead-stop")
        # Containers are read while starts take long; while one read hangs, the next one has the second thread.
        self._looks = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pierhead-look")
        # Pulls take minutes.
        self._pulls = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pierhead-pull")
        # Some logging drivers never answer.
        self._log_calls = ThreadPoolExecutor(max_workers=4, thread_name_prefix="pierhead-logs")
        self._log_readers = 0

    async def call(self, what: str, call: Callable[[], T]) -> T:
        """Make a call that changes something, or that is rare."""
        return await self._run(what, call, _CALL_TIMEOUT_S, self._calls)

    async def stop(self, what: str, call: Callable[[], T]) -> T:
        """Make a call that ends something: starts may hold all threads of `call` for a minute."""
        return await self._run(what, call, _CALL_TIMEOUT_S, self._stops)

    async def look(self, what: str, call: Callable[[], T]) -> T:
        """Make a call that reads what plans are made from."""
        return await self._run(what, call, _LOOK_TIMEOUT_S, self._looks)

    async def pull(self, what: str, call: Callable[[], T]) -> T:
        """Make a call that pulls an image."""
        return await self._run(what, call, _PULL_TIMEOUT_S, self._pulls)

    async def read_log(self, container_id: str, call: Callable[[], T]) -> T:
        """Make a call that reads a log."""
        what = f"logs of {container_id[:12]}"
        if self._log_readers >= _MOST_LOG_READS:
            raise EngineError(
                f"{what}: {self._log_readers} other requests wait for logs that the Docker Engine does not send; "
                f"repeat it in a minute, or see whether `docker logs {container_id[:12]}` answers"
            )
        self._log_readers += 1
        try:
            return await self._run(what, call, _LOGS_TIMEOUT_S, self._log_calls)
        finally:
            self._log_readers -= 1

    def close(self) -> None:
        """End the threads; calls in progress are not waited for."""
        for pool in (self._calls, self._stops, self._looks, self._pulls, self._log_calls):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, what: str, call: Callable[[], T], limit_s: float, pool: ThreadPoolExecutor) -> T:
        try:
            async with asyncio.timeout(limit_s):
                with translated(what, self._hints):
                    return await asyncio.get_running_loop().run_in_executor(pool, call)
        except TimeoutError as error:
            raise EngineUnreachable(
                f"{what}: the Docker Engine did not finish within {limit_s:.0f} s; check `docker info`"
            ) from error


def end_of(log: bytes) -> bytes:
    """The last whole lines that fit into 64 KiB, so that two readings can be compared line by line.

    If the last line alone is longer, its end.
    """
    kept = log[-_LONGEST_LOG:]
    if len(kept) == len(log) or log[-_LONGEST_LOG - 1 : -_LONGEST_LOG] == b"\n":
        return kept
    return kept.partition(b"\n")[2] or kept
