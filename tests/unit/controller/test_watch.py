"""A part of the world is read outside the looks: what a look uses, what it waits for, what counts as in progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from controller.daemon.loop import LOOK_S
from controller.errors import EngineUnreachable
from controller.model.actions import RemoveContainer, StartContainer
from controller.observe.watch import PATIENCE_S, REST_S, Watch
from controller.outlive import Background
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import service

pytestmark = pytest.mark.virtual_time

SUBJECT = object()
START = StartContainer(target="p-web-1", service="web")
AGE_S, STALE_S, LIMIT_S = 10.0, 5.0, 50.0


class Bench:
    """A watch, the world that it reads, and a loop that looks."""

    def __init__(self) -> None:
        self.world = 0
        self.reading_s = 0.0
        self.breaks: Exception | None = None
        self.readings = 0
        self.woken = 0
        self.now = asyncio.get_running_loop().time
        self.watch: Watch[object, int, StartContainer] = Watch(
            "the world",
            self._read,
            Background(asyncio.create_task, self._wake, self.now),
            limit_s=LIMIT_S,
            stale_s=STALE_S,
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
        """Change the world, and say so to the watch."""
        self.world += 1
        self.watch.changed()

    async def takes_from_now(self, reading_s: float) -> None:
        """Each later reading takes so long; the watch's pause after the last one is over."""
        self.reading_s = reading_s
        await asyncio.sleep(1.0)

    async def look(self, subject: object = SUBJECT, age_s: float = AGE_S, *, thorough: bool = False) -> float:
        """Take a reading; return the seconds that the look waited for it."""
        begun = self.now()
        with self.watch.looking():
            await self.watch.answer(self.watch.ask(subject, age_s, thorough=thorough))
        return self.now() - begun

    def taken(self) -> int | None:
        """The value that the last look took."""
        return self.watch.reading.value if self.watch.reading else None


@pytest_asyncio.fixture
async def new() -> AsyncIterator[Bench]:
    """A watch that has read nothing."""
    bench = Bench()
    task = asyncio.create_task(bench.watch.run())
    yield bench
    task.cancel()


@pytest_asyncio.fixture
async def bench(new: Bench) -> Bench:
    """A watch with one quick reading."""
    await new.look()
    return new


async def test_the_first_look_waits_and_an_unchanged_world_is_not_read_again(new: Bench) -> None:
    new.reading_s = 3.0
    assert await new.look() == 3.0
    assert await new.look() == 0.0
    assert new.readings == 1
    assert new.woken == 0, "the look has taken the reading"


async def test_each_look_has_a_reading_of_its_own_where_no_changes_are_reported(new: Bench) -> None:
    for number in range(3):
        new.world = number
        assert await new.look(age_s=PATIENCE_S) == 0.0
        assert new.taken() == number
        await asyncio.sleep(LOOK_S)
    assert (new.readings, new.woken) == (3, 0)


async def test_a_look_takes_the_last_reading_of_a_slow_world_and_the_next_one_wakes_the_loop(bench: Bench) -> None:
    await bench.takes_from_now(1.0)
    bench.change()
    assert await bench.look() == pytest.approx(PATIENCE_S), "the reading before was quick"
    assert bench.taken() == 0
    await asyncio.sleep(1.0)
    assert bench.woken == 1
    assert await bench.look() == 0.0
    assert bench.taken() == 1
    await asyncio.sleep(5.0)
    assert (bench.readings, bench.woken) == (2, 1), "news is taken, and not read again"


async def test_changes_during_a_reading_cause_one_more_reading(bench: Bench) -> None:
    await bench.takes_from_now(0.2)
    for _ in range(100):
        bench.change()
        await asyncio.sleep(0.001)
    await asyncio.sleep(5.0)
    assert bench.readings == 3
    assert bench.watch.is_fresh(SUBJECT, AGE_S)


async def test_the_pause_between_readings_is_as_long_as_a_reading(bench: Bench) -> None:
    bench.reading_s = 0.2
    for _ in range(400):
        bench.change()
        await asyncio.sleep(0.01)
    assert bench.readings == pytest.approx(4.0 / 0.4, abs=2)


async def test_an_action_counts_as_in_progress_until_a_reading_has_begun_after_its_end(bench: Bench) -> None:
    await bench.takes_from_now(1.0)
    bench.change()
    await asyncio.sleep(0.5)
    bench.watch.ended(START)
    assert bench.watch.unseen == (START,)
    await asyncio.sleep(0.6)
    assert (bench.readings, bench.watch.unseen) == (2, (START,)), "that reading had begun before"
    await asyncio.sleep(2.0)
    assert bench.readings == 3
    assert not bench.watch.unseen


async def test_a_reading_that_fails_has_seen_nothing(bench: Bench) -> None:
    bench.watch.ended(START)
    bench.breaks = EngineUnreachable("it does not answer")
    await bench.look()
    assert (bench.watch.error, bench.watch.unseen) == ("it does not answer", (START,))
    assert not bench.watch.is_fresh(SUBJECT, AGE_S)
    bench.breaks = None
    await asyncio.sleep(1.0)
    await bench.look()
    assert (bench.watch.error, bench.watch.unseen) == ("", ())
    assert bench.watch.is_fresh(SUBJECT, AGE_S)


async def test_a_thorough_look_waits_for_a_reading_that_began_after_it(bench: Bench) -> None:
    await bench.takes_from_now(1.0)
    bench.change()
    await asyncio.sleep(0.5)
    bench.world += 1
    assert await bench.look(thorough=True) == pytest.approx(0.5 + REST_S[1] + 1.0)
    assert bench.taken() == 2


async def test_nothing_is_planned_from_a_reading_of_another_subject(bench: Bench) -> None:
    await bench.takes_from_now(1.0)
    assert await bench.look(object()) == 1.0


async def test_nothing_is_planned_from_a_reading_that_is_too_old(bench: Bench) -> None:
    await bench.takes_from_now(20.0)
    bench.change()
    await asyncio.sleep(STALE_S - 0.1)
    assert await bench.look() < 1.0
    await asyncio.sleep(0.2)
    assert await bench.look() > 10.0


async def test_a_reading_that_grew_too_old_before_the_answer_is_followed_by_another(bench: Bench) -> None:
    await bench.takes_from_now(0.5)
    asked = bench.watch.ask(SUBJECT, 0.05)
    await asyncio.sleep(2 * STALE_S)
    bench.world += 1
    await bench.watch.answer(asked)
    assert bench.taken() == 1


async def test_only_the_first_look_waits_for_a_world_that_never_answers(new: Bench) -> None:
    new.reading_s = 1e6
    assert await new.look() == LIMIT_S
    assert new.watch.error == "the world does not answer within 50 s"
    for _ in range(3):
        assert await new.look() <= PATIENCE_S
        await asyncio.sleep(LOOK_S)
    new.reading_s = 0.0
    await asyncio.sleep(LIMIT_S)
    assert await new.look() == 0.0, "the last reading took long"
    await asyncio.sleep(REST_S[1])
    assert (new.watch.error, new.woken) == ("", 1)


async def test_each_look_raises_a_defect_in_reading_until_a_reading_succeeds(bench: Bench) -> None:
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


# ----------------------------------------------------------------------------------------------------- in the loop


async def test_the_loop_continues_while_the_engine_does_not_answer(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web", replicas=2))
    async with control.running(web=2) as controller:
        control.engine.reading_s = 4.0
        controller.observer.engine.changed()
        await asyncio.sleep(0.1)
        controller.commands.scale("web", 1)
        await until(lambda: len(control.router.ready("web")) == 1, within_s=1.0)
        await control.settled("web", 1, within_s=60.0)


async def test_a_slow_engine_makes_and_removes_each_replica_once(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web", replicas=1))
    async with control.running(web=1) as controller:
        control.engine.reading_s = 0.7
        controller.commands.scale("web", 12)
        await control.settled("web", 12, within_s=60.0)
        assert len(control.engine.containers) == 12
        controller.commands.scale("web", 1)
        await control.settled("web", 1, within_s=60.0)
        assert len([action for action in control.engine.done if isinstance(action, RemoveContainer)]) == 11


async def test_a_retired_replica_stays_retired_while_an_earlier_reading_still_shows_it(tmp_path: Path) -> None:
    """The store forgets a retirement with its container."""
    control = Control.of(tmp_path, service("web", replicas=2))
    async with control.running(web=2) as controller:
        control.engine.reading_s = 2.0
        controller.commands.scale("web", 1)
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
