"""HAProxy is read beside the looks: what a look takes, what it waits for, and what counts as going on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from controller.errors import RoutingError
from controller.loop import LOOK_S
from controller.model.actions import AddServer
from controller.model.world import RoutingState
from controller.observe import router_watch
from controller.observe.router_watch import RouterWatch
from tests.harness.virtual_time import VirtualLoop
from tests.unit.controller.worlds import routing

ADD = AddServer(target="p-web-1", service="web", backend="svc_web", address="10.0.0.1:8080")


class Bench:
    """A watch that runs, a HAProxy, and whoever looks."""

    def __init__(self) -> None:
        self.reading_s = 0.0
        self.is_up = True
        self.is_same = False
        """It says the same each time."""
        self.breaks: Exception | None = None
        self.readings = 0
        self.woken = 0
        self.watch = RouterWatch(self._observe, self._wake, clock=asyncio.get_running_loop().time)

    async def _observe(self) -> RoutingState | None:
        self.readings += 1
        state = routing(pid=1 if self.is_same else self.readings) if self.is_up else None
        await asyncio.sleep(self.reading_s)
        if self.breaks is not None:
            raise self.breaks
        return state

    def _wake(self) -> None:
        self.woken += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.watch.run())
        try:
            yield
        finally:
            task.cancel()

    async def look(self, *, thorough: bool = False) -> float:
        """Take a reading; return how long that was waited for."""
        now = asyncio.get_running_loop().time
        begun = now()
        with self.watch.looking():
            await self.watch.await_reading(thorough=thorough)
        return now() - begun

    def taken(self) -> int:
        """Which reading the last look has; 0 = HAProxy did not answer."""
        state = self.watch.state
        return state.pid if state else 0


def virtually(work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.running():
            await work(bench)

    loop = VirtualLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_each_look_has_an_answer_of_its_own() -> None:
    async def work(bench: Bench) -> None:
        for number in range(1, 4):
            assert await bench.look() == 0.0
            assert bench.taken() == number
        assert bench.woken == 0, "the looks have taken them"

    virtually(work)


def test_the_first_look_waits_for_as_long_as_it_takes() -> None:
    async def work(bench: Bench) -> None:
        bench.reading_s = 3.0
        assert await bench.look() == 3.0
        assert bench.taken() == 1

    virtually(work)


def test_a_look_takes_the_reading_before_while_haproxy_is_slow_and_is_followed_by_one_with_the_next() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.5
        assert await bench.look() == pytest.approx(router_watch.PATIENCE_S)
        assert bench.taken() == 1
        await asyncio.sleep(0.5)
        assert bench.woken == 1
        assert await bench.look() == 0.0
        assert bench.taken() == 2
        await asyncio.sleep(10.0)
        assert (bench.readings, bench.woken) == (2, 1), "news are taken, and not asked for again"

    virtually(work)


def test_an_answer_that_comes_late_and_says_nothing_new_wakes_nobody() -> None:
    async def work(bench: Bench) -> None:
        bench.is_same = True
        await bench.look()
        bench.reading_s = 0.5
        await bench.look()
        await asyncio.sleep(1.0)
        assert (bench.readings, bench.woken) == (2, 0)
        assert await bench.look() == 0.0, "it is old by now, so HAProxy is asked, which will take as long again"
        await asyncio.sleep(router_watch.PATIENCE_S)
        bench.watch.ended(ADD)
        await asyncio.sleep(1.0)
        assert bench.woken == 0, "an action that ends wakes by itself"
        await bench.look()
        await asyncio.sleep(1.0)
        assert (bench.readings, bench.woken) == (4, 1), "what it did is seen now"

    virtually(work)


def test_an_action_that_ends_counts_as_going_on_until_a_reading_has_begun_after_it() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.5
        await bench.look()
        bench.watch.ended(ADD)
        await asyncio.sleep(0.5)
        assert list(bench.watch.unseen) == [ADD], "the reading had begun before"
        assert await bench.look() == 0.0, "what has not seen it is no news, and the next takes as long again"
        await asyncio.sleep(router_watch.PATIENCE_S)
        assert bench.readings == 3
        assert (bench.taken(), list(bench.watch.unseen)) == (2, [ADD])
        await asyncio.sleep(0.5)
        assert not bench.watch.unseen
        await bench.look()
        assert bench.taken() == 3

    virtually(work)


def test_a_look_waits_only_for_an_answer_that_can_be_expected_soon() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.2
        assert await bench.look() == pytest.approx(router_watch.PATIENCE_S), "the one before was quick"
        await asyncio.sleep(1.0)
        assert await bench.look() == 0.0
        await asyncio.sleep(0.19)
        assert await bench.look() == pytest.approx(0.01), "it goes on, and is nearly there"
        assert bench.taken() == 3
        bench.reading_s = 0.01
        assert await bench.look() == 0.0
        await asyncio.sleep(1.0)
        assert await bench.look() == pytest.approx(0.01), "quick once more"

    virtually(work)


def test_an_answer_that_has_not_seen_what_ended_since_is_not_the_one_that_is_expected() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.2
        await bench.look()
        await asyncio.sleep(1.0)
        await bench.look()
        await asyncio.sleep(0.19)
        bench.watch.ended(ADD)
        assert await bench.look() == 0.0, "the next one takes 0.2 s more"

    virtually(work)


def test_a_question_is_waited_for_from_when_it_was_asked() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.5
        asked = bench.watch.ask()
        await asyncio.sleep(2 * router_watch.PATIENCE_S)
        now = asyncio.get_running_loop().time
        begun = now()
        await bench.watch.await_answer(asked)
        assert now() == begun

    virtually(work)


def test_a_reading_that_became_too_old_while_something_else_was_awaited_is_followed_by_another() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.5
        asked = bench.watch.ask()
        await asyncio.sleep(2 * router_watch.STALE_S)  # its answer came, and is old by now
        before = bench.readings
        await bench.watch.await_answer(asked)
        assert bench.readings == before + 1

    virtually(work)


def test_what_haproxy_could_not_say_has_seen_nothing() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.watch.ended(ADD)
        bench.is_up = False
        await bench.look()
        assert (bench.taken(), list(bench.watch.unseen)) == (0, [ADD])
        bench.is_up = True
        await bench.look()
        assert (bench.taken(), list(bench.watch.unseen)) == (3, [])

    virtually(work)


def test_nothing_is_planned_from_a_reading_that_is_too_old() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 4.0
        longest, age = 0.0, 0.0
        for _ in range(20):
            longest = max(longest, await bench.look())
            assert bench.watch.reading is not None
            age = max(age, asyncio.get_running_loop().time() - bench.watch.reading.at)
            await asyncio.sleep(LOOK_S)
        assert longest <= 2 * bench.reading_s
        assert age <= max(router_watch.STALE_S + router_watch.PATIENCE_S, bench.reading_s + LOOK_S)

    virtually(work)


def test_a_haproxy_that_says_nothing_does_not_answer() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 1e6
        for _ in range(10):
            await bench.look()
            await asyncio.sleep(LOOK_S)
        assert bench.taken() == 0

    virtually(work)


def test_a_thorough_look_waits_until_it_was_asked_after_the_call() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 1.0
        await bench.look()
        assert await bench.look(thorough=True) == pytest.approx(2.0 - router_watch.PATIENCE_S)
        assert bench.taken() == 3

    virtually(work)


def test_a_defect_is_raised_by_the_look_and_a_refusal_is_no_answer() -> None:
    async def work(bench: Bench) -> None:
        bench.breaks = RoutingError("no")
        await bench.look()
        assert bench.taken() == 0
        bench.breaks = ValueError("a defect")
        await bench.look()
        with pytest.raises(ValueError, match="a defect"):
            bench.taken()
        bench.breaks = None
        await bench.look()
        assert bench.taken() == 3

    virtually(work)
