"""What is concluded from health checks: failures, checks that hang, checks that wait behind work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pierhead import Broken, Settings, recheck
from pierhead.replica.health import FAILURES, HealthJudge, HealthWatch, ReplicaLoad, checks_of

from tests.unit.runtime.harness import until

IDLE = ReplicaLoad(ongoing=0, answered=100)


class TestJudge:
    def test_three_failures_in_a_row_are_an_illness_and_one_success_the_cure(self) -> None:
        judge = HealthJudge(timeout_s=10, patience_s=60)
        ill = []
        for passes in (False, False, True, False, False, False, False, True):
            judge.passed() if passes else judge.failed()
            ill.append(judge.ill)
        assert ill == [False, False, False, False, False, True, True, False]

    def test_one_certain_failure_is_an_illness_until_a_check_passes(self) -> None:
        judge = HealthJudge(timeout_s=10, patience_s=60)
        judge.failed(certain=True)
        seen = [(judge.ill, judge.broken)]
        judge.failed()
        seen.append((judge.ill, judge.broken))
        judge.passed()
        seen.append((judge.ill, judge.broken))
        assert seen == [(True, True), (True, True), (False, False)], "doubt takes nothing back"

    @pytest.mark.parametrize(
        ("pending_s", "before", "answered", "may_wait"),
        [
            pytest.param(9.9, IDLE, 0, True, id="it has its time"),
            pytest.param(10, IDLE, 0, False, id="nothing was before it"),
            pytest.param(10, ReplicaLoad(100, 100), 0, False, id="the line does not move"),
            pytest.param(30, ReplicaLoad(100, 1000), 150, True, id="the line moves slowly"),
            pytest.param(10, ReplicaLoad(3, 1000), 500, False, id="its turn is long over"),
            pytest.param(59, ReplicaLoad(100, 0), 50, True, id="as long as a request may take"),
            pytest.param(60, ReplicaLoad(100, 0), 50, False, id="longer than a request may take"),
        ],
    )
    def test_when_a_check_gets_time(self, pending_s: float, before: ReplicaLoad, answered: int, may_wait: bool) -> None:
        now = ReplicaLoad(before.ongoing, before.answered + answered)
        assert HealthJudge(timeout_s=10, patience_s=60).may_wait(pending_s, before, now) is may_wait


class Watched:
    """A watch over one check that a test steers, with the judgements that came of it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.problem: Exception | None = None
        self.load = IDLE
        self.judgements: list[str] = []
        self.checks = 0
        self.ended = 0
        self.hears = True
        """Whether the check ends when it is cancelled."""

    async def check(self) -> None:
        self.checks += 1
        try:
            while not self.gate.is_set():
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    if self.hears:
                        raise
            if self.problem is not None:
                raise self.problem
        finally:
            self.ended += 1

    async def judged(self, reason: str) -> None:
        self.judgements.append(reason)

    def watch(self, period_s: float = 0.005) -> HealthWatch:
        settings = Settings(health_period_s=period_s, health_timeout_s=0.02, request_timeout_s=60.0)
        return HealthWatch([("Model", self.check)], settings, lambda: self.load, self.judged)

    @asynccontextmanager
    async def running(self, period_s: float = 0.005) -> AsyncIterator[HealthWatch]:
        watch = self.watch(period_s)
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert self.checks == self.ended, "no check is left behind"


HOUR_S = 3600.0


class TestWatch:
    async def test_a_check_that_hangs_while_others_are_served_makes_it_ill(self) -> None:
        watched = Watched()
        watched.gate.clear()
        async with watched.running():
            while not watched.judgements:
                watched.load = ReplicaLoad(ongoing=1, answered=watched.load.answered + 50)
                await asyncio.sleep(0.001)
            assert watched.judgements[0] == (
                "check_health failed 3 times in a row: it has not ended within 0.02 s; 1 requests are in flight"
            )
            assert watched.checks == FAILURES, "each of them was given up before the next"
            watched.gate.set()
            await until(lambda: watched.judgements[-3:] == [""] * 3, "it is well again, as each round says")

    async def test_a_check_behind_a_slow_line_is_given_time(self, caplog: pytest.LogCaptureFixture) -> None:
        watched = Watched()
        watched.gate.clear()
        watched.load = ReplicaLoad(ongoing=1000, answered=0)
        async with watched.running():
            while caplog.text.count("may wait behind 1000 requests") < 2 * FAILURES:
                watched.load = ReplicaLoad(ongoing=1000, answered=watched.load.answered + 0.01)
                await asyncio.sleep(0.001)
            assert watched.checks == 1, "it is one check that waits, not one after another"
            watched.gate.set()
            await until(lambda: watched.judgements != [], "it has had its turn")
            assert watched.judgements[0] == ""

    async def test_a_check_that_ignores_its_cancellation_is_not_run_twice(self) -> None:
        watched = Watched()
        watched.gate.clear()
        watched.hears = False
        async with watched.running():
            await until(lambda: len(watched.judgements) == 2, "it is ill, and judged again")
            assert watched.checks == 1
            watched.gate.set()
            await until(lambda: watched.judgements[-1] == "", "it is well again")

    async def test_a_check_that_is_certain_counts_at_once_and_can_be_asked_for(self) -> None:
        watched = Watched()
        async with watched.running(HOUR_S) as watch:
            watched.problem = Broken("the engine has ended")
            await asyncio.to_thread(recheck)
            await until(lambda: watched.judgements == ["the engine has ended"], "it is ill, an hour early")
            assert (watched.checks, watch.broken) == (1, True)

    async def test_a_check_that_was_asked_for_counts_only_when_it_is_certain(self) -> None:
        watched = Watched()
        async with watched.running(HOUR_S):
            for problem in (RuntimeError("the line was busy"), None):
                watched.problem = problem
                before = watched.checks
                while watched.checks < before + FAILURES:
                    recheck()
                    await asyncio.sleep(0.001)
            assert watched.judgements == []

    async def test_however_often_it_is_asked_for_its_own_checks_are_made(self) -> None:
        """Also under overload, which excuses no failure."""
        watched = Watched()
        watched.load = ReplicaLoad(ongoing=1000, answered=10)
        watched.problem = RuntimeError("the GPU fell off the bus")
        async with watched.running(0.2):
            while not watched.judgements:
                recheck()
                await asyncio.sleep(0.001)
            assert watched.judgements[0] == "check_health failed 3 times in a row: the GPU fell off the bus"


def test_a_check_must_be_async() -> None:
    class Part:
        def check_health(self) -> None: ...

    with pytest.raises(TypeError, match=r"Part\.check_health must be `async def"):
        checks_of([Part()])
