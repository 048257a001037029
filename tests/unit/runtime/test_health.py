"""What is concluded from health checks: failures, checks that hang, checks that wait behind work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead import Broken, Settings, recheck
from pierhead.replica.health import FAILURES, LINES, HealthWatch, Judge, Load, checks_of

from tests.unit.runtime.harness import until

IDLE = Load(ongoing=0, answered=100)


class TestJudge:
    def test_three_failures_in_a_row_are_an_illness_and_one_success_the_cure(self) -> None:
        judge = Judge(timeout_s=10, patience_s=60)
        ill = []
        for passes in (False, False, True, False, False, False, False, True):
            judge.passed() if passes else judge.failed()
            ill.append(judge.ill)
        assert ill == [False, False, False, False, False, True, True, False]

    def test_one_certain_failure_is_an_illness_until_a_check_passes(self) -> None:
        judge = Judge(timeout_s=10, patience_s=60)
        judge.failed(certain=True)
        seen = [(judge.ill, judge.broken)]
        judge.failed()
        seen.append((judge.ill, judge.broken))
        judge.passed()
        seen.append((judge.ill, judge.broken))
        assert seen == [(True, True), (True, True), (False, False)], "doubt takes nothing back"

    def test_nobody_was_answered_so_it_hangs(self) -> None:
        judge = Judge(timeout_s=10, patience_s=60)
        assert judge.may_wait(9.9, IDLE, IDLE)
        assert not judge.may_wait(10, IDLE, IDLE)
        stuck = Load(ongoing=100, answered=100)
        assert not judge.may_wait(10, stuck, stuck)

    def test_a_line_that_moves_slowly_explains_it(self) -> None:
        judge = Judge(timeout_s=10, patience_s=60)
        before = Load(ongoing=100, answered=1000)
        assert judge.may_wait(30, before, Load(ongoing=100, answered=1150))

    def test_others_are_served_and_it_is_not(self) -> None:
        """A line of 3 stood before it, and 500 were answered meanwhile: something else is the matter."""
        judge = Judge(timeout_s=10, patience_s=60)
        assert not judge.may_wait(10, Load(3, 1000), Load(ongoing=3, answered=1500))

    def test_no_line_explains_more_than_a_request_may_take(self) -> None:
        judge = Judge(timeout_s=10, patience_s=60)
        assert judge.may_wait(59, Load(100, 0), Load(100, 50))
        assert not judge.may_wait(60, Load(100, 0), Load(100, 50))

    @given(
        pending_s=st.floats(0, 1000),
        timeout_s=st.floats(0.01, 100),
        patience_s=st.floats(0.01, 100),
        ongoing=st.integers(0, 1000),
        answered=st.integers(0, 5000),
    )
    def test_every_wait_ends(
        self, pending_s: float, timeout_s: float, patience_s: float, ongoing: int, answered: int
    ) -> None:
        may = Judge(timeout_s, patience_s).may_wait(pending_s, Load(ongoing, 0), Load(ongoing, answered))
        if pending_s < timeout_s:
            assert may, "it has its time in any case"
        elif pending_s >= patience_s or answered == 0 or answered >= LINES * ongoing:
            assert not may


class Watched:
    """A watch over one check that a test steers, with the judgements that came of it."""

    def __init__(self, **settings: float) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.problem: Exception | None = None
        self.load = IDLE
        self.judgements: list[str] = []
        self.checks_before: list[int] = []
        """How many checks had been made, for each of them."""
        self.checks = 0
        self.ended = 0
        fast: dict[str, float] = {"health_period_s": 0.005, "health_timeout_s": 0.02, "request_timeout_s": 60.0}
        self.watch = HealthWatch(
            [("Model", self.check)],
            Settings(**(fast | settings)),  # type: ignore[arg-type]
            lambda: self.load,
            self._judged,
        )

    async def check(self) -> None:
        self.checks += 1
        try:
            await self.gate.wait()
            if self.problem is not None:
                raise self.problem
        finally:
            self.ended += 1

    async def _judged(self, reason: str) -> None:
        self.checks_before.append(self.checks)
        self.judgements.append(reason)

    async def during(self, steps: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self.watch.run())
        try:
            await steps()
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert self.checks == self.ended, "no check is left behind"


class TestWatch:
    async def test_each_round_that_passes_is_told(self) -> None:
        watched = Watched()

        async def steps() -> None:
            await until(lambda: watched.judgements == [""] * 3, "three rounds")

        await watched.during(steps)

    async def test_a_check_that_hangs_while_others_are_served_makes_it_ill(self) -> None:
        watched = Watched()
        watched.gate.clear()

        async def steps() -> None:
            while not watched.judgements:
                watched.load = Load(ongoing=1, answered=watched.load.answered + 50)
                await asyncio.sleep(0.001)
            assert watched.judgements[0] == (
                "check_health failed 3 times in a row: it has not ended within 0.02 s; 1 requests are in flight"
            )
            assert watched.checks == FAILURES, "each of them was given up before the next"
            watched.gate.set()
            await until(lambda: watched.judgements[-1] == "", "it is well again")

        await watched.during(steps)

    async def test_a_check_behind_a_slow_line_is_given_time(self, caplog: pytest.LogCaptureFixture) -> None:
        watched = Watched()
        watched.gate.clear()
        watched.load = Load(ongoing=1000, answered=0)

        async def steps() -> None:
            while caplog.text.count("may wait behind 1000 requests") < 2 * FAILURES:
                watched.load = Load(ongoing=1000, answered=watched.load.answered + 0.01)
                await asyncio.sleep(0.001)
            assert watched.checks == 1, "it is one check that waits, not one after another"
            watched.gate.set()
            await until(lambda: watched.judgements != [], "it has had its turn")
            assert watched.judgements[0] == ""

        await watched.during(steps)

    async def test_a_failure_during_overload_is_one_all_the_same(self) -> None:
        watched = Watched()
        watched.load = Load(ongoing=1000, answered=10)
        watched.problem = RuntimeError("the GPU fell off the bus")

        async def steps() -> None:
            await until(lambda: watched.judgements != [], "it is ill")
            assert watched.judgements[0] == "check_health failed 3 times in a row: the GPU fell off the bus"

        await watched.during(steps)

    async def test_a_check_that_ignores_its_cancellation_is_not_run_twice(self) -> None:
        release, runs = asyncio.Event(), 0

        async def stubborn() -> None:
            nonlocal runs
            runs += 1
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        reasons: list[str] = []

        async def judged(reason: str) -> None:
            reasons.append(reason)

        settings = Settings(health_period_s=0.005, health_timeout_s=0.01)
        watch = HealthWatch([("Model", stubborn)], settings, lambda: IDLE, judged)
        task = asyncio.create_task(watch.run())
        await until(lambda: len(reasons) == 2, "it is ill, and judged again")
        assert runs == 1
        release.set()
        await until(lambda: reasons[-1] == "", "it is well again")
        task.cancel()
        await asyncio.wait([task])

    async def test_a_check_that_is_certain_counts_at_once(self) -> None:
        watched = Watched(health_period_s=0.5)
        watched.problem = Broken("the engine has ended")

        async def steps() -> None:
            await until(lambda: bool(watched.judgements), "it is ill")
            assert (watched.judgements[0], watched.checks_before[0]) == ("the engine has ended", 1)
            assert watched.watch.broken

        await watched.during(steps)

    async def test_who_knows_has_it_checked_now(self) -> None:
        watched = Watched(health_period_s=3600.0)

        async def steps() -> None:
            await until(lambda: watched.watch._loop is not None, "it runs")
            watched.problem = Broken("the engine has ended")
            await asyncio.to_thread(recheck)
            await until(lambda: watched.judgements == ["the engine has ended"], "it is ill, an hour early")

        await watched.during(steps)

    async def test_a_check_that_was_asked_for_counts_only_when_it_is_certain(self) -> None:
        watched = Watched(health_period_s=3600.0)

        async def steps() -> None:
            await until(lambda: watched.watch._loop is not None, "it runs")
            for problem in (RuntimeError("the line was busy"), None):
                watched.problem = problem
                before = watched.checks
                while watched.checks < before + FAILURES:
                    recheck()
                    await asyncio.sleep(0.001)
            assert watched.judgements == []

        await watched.during(steps)

    async def test_however_often_it_is_asked_for_its_own_checks_are_made(self) -> None:
        watched = Watched(health_period_s=0.2)
        watched.problem = RuntimeError("the GPU fell off the bus")

        async def steps() -> None:
            while not watched.judgements:
                recheck()
                await asyncio.sleep(0.001)
            assert watched.judgements[0].startswith("check_health failed 3 times in a row")

        await watched.during(steps)

    async def test_what_a_check_raises_names_its_part(self) -> None:
        watched = Watched()
        watched.problem = RuntimeError("CUDA is not there")
        with pytest.raises(RuntimeError) as caught:
            await watched.watch.check_all()
        assert caught.value.__notes__ == ["raised by Model.check_health"]


def test_a_check_must_be_async() -> None:
    class Part:
        def check_health(self) -> None: ...

    with pytest.raises(TypeError, match=r"Part\.check_health must be `async def"):
        checks_of([Part()])
