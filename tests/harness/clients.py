"""Several clients at once: each is a load (load.py) in a process of its own. `result` is what all of them saw."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tests.harness.load import Load, LoadResult


class Clients:
    """Runs loads around a block of a test. None of them may end before the block does."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        self.result = LoadResult()
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as starting:
            for load in self.loads:
                starting.enter_context(load)
            self._running = starting.pop_all()
        return self

    def so_far(self) -> int:
        """How many requests have ended, failed ones too."""
        return sum(load.so_far() for load in self.loads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended = [number for number, load in enumerate(self.loads, 1) if not load.is_running]
        try:
            self._running.close()
        finally:
            self.result = merged([load.result for load in self.loads])
        assert error is not None or not ended, f"clients {ended} ended by themselves before the test did"


def merged(results: Sequence[LoadResult]) -> LoadResult:
    """What several loads saw. Latencies are those of the slowest one, because percentiles have no sum."""
    return LoadResult(
        requests=sum(one.requests for one in results),
        failed=sum(one.failed for one in results),
        seconds=max((one.seconds for one in results), default=0.0),
        p50_ms=max((one.p50_ms for one in results), default=0.0),
        p99_ms=max((one.p99_ms for one in results), default=0.0),
        max_ms=max((one.max_ms for one in results), default=0.0),
        failures=sorted((failure for one in results for failure in one.failures), key=lambda one: one.at),
        last_failed_begun_at=max((one.last_failed_begun_at for one in results), default=0.0),
        counts=sorted((count for one in results for count in one.counts), key=lambda one: one.second),
        keeps=sum(one.keeps for one in results),
    )
