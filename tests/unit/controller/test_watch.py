"""A part of the world is read beside the looks: what a look takes, what it waits for, what counts as in progress."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from controller.errors import EngineUnreachable
from controller.loop import LOOK_S
from controller.model.actions import RemoveContainer, StartContainer
from controller.observe.watch import PATIENCE_S, REST_S, Watch
from tests.harness.virtual_time import VirtualLoop
from tests.unit.controller.control import Control
from tests.unit.controller.worlds import service

SUBJECT = object()
START = StartContainer(target="p-web-1", service="web")
AGE_S, STALE_S, LIMIT_S = 10.0, 5.0, 50.0


class Bench:
    """A watch that runs, the world that it reads, and a loop that looks."""

    def __init__(self) -> None:
        self.world = 0
        self.reading_s = 0.0
        self.breaks: Exception | None = None
        self.readings = 0
        self.woken = 0
        self.watch: Watch[object, int, StartContainer] = Watch(
            "the world",
            self._read,
            self._wake,
            limit_s=LIMIT_S,
            stale_s=STALE_S,
            clock=asyncio.get_running_loop().time,
        )

    async def _read(self, subject: object) -> int:
        self.readings += 1
        value, breaks = self.world, self.breaks
        await asyncio.sleep(self.reading_s)
        if breaks is not None:
            raise breaks
        return value

    def _wake(self) -> None:
        self.woken += 1

    def change(self) -> None:
        """The world is another, and the watch learns that something happened."""
        self.world += 1
        self.watch.changed()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.watch.run())
        try:
            yield
        finally:
            task.cancel()

    async def look(self, subject: object = SUBJECT, age_s: float = AGE_S, *, thorough: bool = False) -> float:
        """Take a reading; return how long that was waited for."""
        now = asyncio.get_running_loop().time
        begun = now()
        with self.watch.looking():
            await self.watch.answer(self.watch.ask(subject, age_s, thorough=thorough))
        return now() - begun

    def taken(self) -> int | None:
        """What the last look has taken."""
        return self.watch.reading.value if self.watch.reading else None


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


def test_the_first_look_waits_and_what_has_not_changed_is_not_read_again() -> None:
    async def work(bench: Bench) -> None:
        bench.reading_s = 3.0
        assert await bench.look() == 3.0
        assert await bench.look() == 0.0
        assert bench.readings == 1
        assert bench.woken == 0, "the look has taken it"

    virtually(work)


def test_where_nothing_tells_of_changes_each_look_has_a_reading_of_its_own() -> None:
    async def work(bench: Bench) -> None:
        for number in range(3):
            bench.world = number
            assert await bench.look(age_s=PATIENCE_S) == 0.0
            assert bench.taken() == number
            await asyncio.sleep(LOOK_S)
        assert (bench.readings, bench.woken) == (3, 0)

    virtually(work)


def test_a_look_takes_the_last_reading_while_the_world_is_slow_and_is_followed_by_one_with_the_next() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 1.0
        await asyncio.sleep(1.0)
        bench.change()
        assert await bench.look() == pytest.approx(PATIENCE_S), "the one before was quick"
        assert bench.taken() == 0
        await asyncio.sleep(1.0)
        assert bench.woken == 1
        assert await bench.look() == 0.0
        assert bench.taken() == 1
        await asyncio.sleep(5.0)
        assert (bench.readings, bench.woken) == (2, 1), "news are taken, and not asked for again"

    virtually(work)


def test_a_look_waits_only_for_a_reading_that_can_be_expected_soon() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.2
        await asyncio.sleep(1.0)
        bench.change()
        await bench.look()
        await asyncio.sleep(1.0)
        await bench.look()
        bench.change()
        assert await bench.look() == 0.0
        await asyncio.sleep(0.17)
        assert await bench.look() == pytest.approx(0.03), "it goes on, and is nearly there"
        bench.change()
        await asyncio.sleep(0.01)
        assert await bench.look() == 0.0, "the world is left alone for a while, and then takes 0.2 s"
        bench.reading_s = 0.03
        await asyncio.sleep(1.0)
        assert await bench.look() == 0.0
        bench.change()
        assert await bench.look() == pytest.approx(0.03), "quick once more"

    virtually(work)


def test_a_reading_that_comes_late_and_says_nothing_new_wakes_only_for_what_had_ended() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.5
        await asyncio.sleep(1.0)
        bench.watch.changed()
        await bench.look()
        await asyncio.sleep(1.0)
        assert (bench.readings, bench.woken) == (2, 0)
        bench.watch.ended(START)
        await asyncio.sleep(1.0)
        assert (bench.readings, bench.woken) == (3, 1), "what the action did is seen now"

    virtually(work)


def test_changes_while_it_is_being_read_are_one_more_reading() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.2
        await asyncio.sleep(1.0)
        for _ in range(100):
            bench.change()
            await asyncio.sleep(0.001)
        await asyncio.sleep(5.0)
        assert bench.readings == 3
        assert bench.watch.is_fresh(SUBJECT, AGE_S)

    virtually(work)


def test_a_world_that_is_slow_is_left_alone_for_as_long_as_it_took() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.2
        for _ in range(400):
            bench.change()
            await asyncio.sleep(0.01)
        assert bench.readings == pytest.approx(4.0 / 0.4, abs=2)

    virtually(work)


def test_an_action_counts_as_in_progress_until_a_reading_has_begun_after_its_end() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 1.0
        await asyncio.sleep(1.0)
        bench.change()
        await asyncio.sleep(0.5)
        bench.watch.ended(START)
        assert bench.watch.unseen == (START,)
        await asyncio.sleep(0.6)
        assert bench.readings == 2
        assert bench.watch.unseen == (START,), "that reading had begun before"
        await asyncio.sleep(2.0)
        assert bench.readings == 3
        assert not bench.watch.unseen

    virtually(work)


def test_a_reading_that_fails_has_seen_nothing() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.watch.ended(START)
        bench.breaks = EngineUnreachable("it does not answer")
        await bench.look()
        assert bench.watch.error == "it does not answer"
        assert bench.watch.unseen == (START,)
        assert not bench.watch.is_fresh(SUBJECT, AGE_S)
        bench.breaks = None
        await asyncio.sleep(1.0)
        await bench.look()
        assert bench.watch.error == ""
        assert bench.watch.is_fresh(SUBJECT, AGE_S)
        assert not bench.watch.unseen

    virtually(work)


def test_a_thorough_look_waits_for_a_reading_that_began_after_it() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 1.0
        await asyncio.sleep(1.0)
        bench.change()
        await asyncio.sleep(0.5)
        bench.world += 1
        assert await bench.look(thorough=True) == pytest.approx(0.5 + REST_S[1] + 1.0)
        assert bench.taken() == 2

    virtually(work)


def test_readings_of_another_subject_are_not_planned_from() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 1.0
        await asyncio.sleep(1.0)
        assert await bench.look(object()) == 1.0

    virtually(work)


def test_a_reading_that_is_too_old_is_not_planned_from() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 20.0
        await asyncio.sleep(1.0)
        bench.change()
        await asyncio.sleep(STALE_S - 0.1)
        assert await bench.look() < 1.0
        await asyncio.sleep(0.2)
        assert await bench.look() > 10.0

    virtually(work)


def test_a_reading_that_became_too_old_while_something_else_was_awaited_is_followed_by_another() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.5
        await asyncio.sleep(1.0)
        asked = bench.watch.ask(SUBJECT, 0.05)
        await asyncio.sleep(2 * STALE_S)  # its answer came, and is old by now
        bench.world += 1
        await bench.watch.answer(asked)
        assert bench.taken() == 1

    virtually(work)


def test_an_answer_is_waited_for_from_when_it_was_asked_for() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.reading_s = 0.5
        await asyncio.sleep(1.0)
        asked = bench.watch.ask(SUBJECT, 0.05)
        await asyncio.sleep(2 * PATIENCE_S)
        now = asyncio.get_running_loop().time
        begun = now()
        await bench.watch.answer(asked)
        assert now() == begun

    virtually(work)


def test_a_world_that_never_answers_is_away_and_only_the_first_look_waits_for_it() -> None:
    async def work(bench: Bench) -> None:
        bench.reading_s = 1e6
        assert await bench.look() == LIMIT_S
        assert bench.watch.error == "the world does not answer within 50 s"
        for _ in range(3):
            assert await bench.look() <= PATIENCE_S
            await asyncio.sleep(LOOK_S)
        bench.reading_s = 0.0
        await asyncio.sleep(LIMIT_S)
        assert await bench.look() == 0.0, "the last reading took long"
        await asyncio.sleep(REST_S[1])
        assert (bench.watch.error, bench.woken) == ("", 1)

    virtually(work)


def test_a_defect_in_reading_is_every_looks_until_a_reading_succeeds() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.breaks = KeyError("Names")
        bench.watch.changed()
        for _ in range(2):
            await bench.look()
            with pytest.raises(KeyError, match="Names"):
                str(bench.watch.error)
            await asyncio.sleep(LOOK_S)
        bench.breaks = None
        await bench.look()
        assert bench.watch.error == ""

    virtually(work)


# ----------------------------------------------------------------------------------------------------- in the loop


def live(tmp_path: Path, work: Callable[[Control], Coroutine[Any, Any, None]], replicas: int) -> None:
    """A controller in virtual time, with so many replicas that take traffic."""
    loop = VirtualLoop()
    control = Control.of(tmp_path, service("web", replicas=replicas))

    async def main() -> None:
        async with control.running():
            await until(lambda: control.row("web") == (replicas, replicas, replicas))
            await work(control)

    try:
        loop.run_until_complete(main())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def until(look: Callable[[], object], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not look():  # noqa: ASYNC110 - what is looked at does not tell
            await asyncio.sleep(0.01)


def test_the_loop_goes_on_while_the_engine_does_not_answer(tmp_path: Path) -> None:
    async def work(control: Control) -> None:
        control.engine.reading_s = 4.0
        control.controller.observer.engine_changed()
        await asyncio.sleep(0.1)
        control.controller.commands.scale("web", 1)
        await until(lambda: len(control.router.ready("web")) == 1, within_s=1.0)
        await until(lambda: control.row("web") == (1, 1, 1), within_s=60.0)

    live(tmp_path, work, 2)


def test_many_replicas_are_made_once_each_by_an_engine_that_is_slow_to_tell(tmp_path: Path) -> None:
    async def work(control: Control) -> None:
        control.engine.reading_s = 0.7
        control.controller.commands.scale("web", 12)
        await until(lambda: control.row("web") == (12, 12, 12), within_s=60.0)
        assert len(control.engine.containers) == 12
        control.controller.commands.scale("web", 1)
        await until(lambda: control.row("web") == (1, 1, 1), within_s=60.0)
        assert len([action for action in control.engine.done if isinstance(action, RemoveContainer)]) == 11

    live(tmp_path, work, 1)


def test_one_that_was_told_to_go_stays_so_for_as_long_as_an_earlier_reading_shows_it(tmp_path: Path) -> None:
    """The note of its retirement goes with the container."""

    async def work(control: Control) -> None:
        control.engine.reading_s = 2.0
        control.controller.commands.scale("web", 1)
        await until(lambda: control.store.retirements)
        (gone,) = control.store.retirements
        await until(lambda: gone not in control.store.retirements, within_s=60.0)
        assert gone not in control.engine.containers
        views = 0
        while (observed := control.view.observed) and any(one.id == gone for one in observed.containers):
            assert gone in observed.retirements
            views += 1
            await asyncio.sleep(0.1)
        assert views > 3
        assert "replica_failed" not in control.kinds()

    live(tmp_path, work, 2)


def test_an_engine_that_is_away_is_told_of_and_nothing_is_planned(tmp_path: Path) -> None:
    async def work(control: Control) -> None:
        control.engine.go_away()
        await until(lambda: not control.view.engine_reachable)
        control.controller.commands.scale("web", 1)
        await asyncio.sleep(3.0)
        assert len(control.router.ready("web")) == 2
        with pytest.raises(EngineUnreachable, match="nothing was changed"):
            await control.controller.commands.deploy(["web"])
        control.engine.come_back()
        await until(lambda: control.row("web") == (1, 1, 1))

    live(tmp_path, work, 2)
