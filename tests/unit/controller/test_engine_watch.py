"""The engine is read beside the looks: what a look takes, what it waits for, and what counts as going on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import pytest

from controller.engines.base import EngineState
from controller.errors import EngineUnreachable
from controller.loop import LOOK_S
from controller.model.actions import RemoveContainer, StartContainer
from controller.model.spec import Spec
from controller.observe import engine_watch
from controller.observe.engine_watch import EngineWatch
from tests.fakes.fake_engine import FakeEngine
from tests.harness.virtual_time import VirtualLoop
from tests.unit.controller.control import Control
from tests.unit.controller.worlds import service

SPEC = Spec("p", {})
START = StartContainer(target="p-web-1", service="web")


class Engine(FakeEngine):
    """Counts how often it is read, and may break."""

    readings = 0
    breaks: Exception | None = None

    async def observe(self, project: str, service_names: Collection[str], images: Collection[str]) -> EngineState:
        self.readings += 1
        state = await super().observe(project, service_names, images)
        if self.breaks is not None:
            raise self.breaks
        return state


class Bench:
    """A watch that runs, and whoever looks."""

    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.engine = Engine(clock)
        self.woken = 0
        self.watch = EngineWatch(self.engine, frozenset, self._wake, clock=clock)

    def _wake(self) -> None:
        self.woken += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.watch.run())
        try:
            yield
        finally:
            task.cancel()

    async def look(self, spec: Spec = SPEC, *, thorough: bool = False) -> float:
        """Take a reading; return how long that was waited for."""
        now = asyncio.get_running_loop().time
        begun = now()
        with self.watch.looking():
            await self.watch.await_reading(spec, 10.0, thorough=thorough)
        return now() - begun


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
        bench.engine.reading_s = 3.0
        assert await bench.look() == 3.0
        assert await bench.look() == 0.0
        assert bench.engine.readings == 1
        assert bench.woken == 0, "the look has taken it"

    virtually(work)


def test_a_look_takes_the_reading_before_while_the_engine_is_slow_and_is_followed_by_one_with_the_next() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        before = bench.watch.reading
        bench.engine.reading_s = 1.0
        await asyncio.sleep(1.0)
        bench.watch.changed()
        assert await bench.look() == pytest.approx(engine_watch.PATIENCE_S)
        assert bench.watch.reading is before
        await asyncio.sleep(1.0)
        assert bench.woken == 1
        assert bench.watch.reading is not before
        assert await bench.look() == 0.0

    virtually(work)


def test_a_look_waits_for_an_engine_that_answers_soon() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.reading_s = 0.03
        await asyncio.sleep(1.0)
        bench.watch.changed()
        assert await bench.look() == pytest.approx(0.03)
        assert bench.watch.is_fresh(SPEC, 10.0)

    virtually(work)


def test_a_look_waits_only_for_a_reading_that_can_be_expected_soon() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.reading_s = 0.2
        await asyncio.sleep(1.0)
        bench.watch.changed()
        assert await bench.look() == pytest.approx(engine_watch.PATIENCE_S), "the one before was quick"
        await asyncio.sleep(1.0)
        await bench.look()
        bench.watch.changed()
        assert await bench.look() == 0.0
        await asyncio.sleep(0.17)
        assert await bench.look() == pytest.approx(0.03), "it goes on, and is nearly there"
        bench.watch.changed()
        await asyncio.sleep(0.01)
        assert await bench.look() == 0.0, "the engine is left alone for a while, and then takes 0.2 s"
        bench.engine.reading_s = 0.03
        await asyncio.sleep(1.0)
        assert await bench.look() == 0.0
        bench.watch.changed()
        assert await bench.look() == pytest.approx(0.03), "quick once more"

    virtually(work)


def test_changes_while_it_is_being_read_are_one_more_reading() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.reading_s = 0.2
        await asyncio.sleep(1.0)
        for _ in range(100):
            bench.watch.changed()
            await asyncio.sleep(0.001)
        await asyncio.sleep(5.0)
        assert bench.engine.readings == 3
        assert bench.watch.is_fresh(SPEC, 10.0)

    virtually(work)


def test_an_engine_that_is_slow_is_left_alone_for_as_long_as_it_took() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.reading_s = 0.2
        for _ in range(400):
            bench.watch.changed()
            await asyncio.sleep(0.01)
        assert bench.engine.readings == pytest.approx(4.0 / 0.4, abs=2)

    virtually(work)


def test_an_action_counts_as_going_on_until_a_reading_has_begun_after_its_end() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.reading_s = 1.0
        await asyncio.sleep(1.0)
        bench.watch.changed()
        await asyncio.sleep(0.5)
        bench.watch.ended(START)
        assert bench.watch.unseen == (START,)
        await asyncio.sleep(0.6)
        assert bench.engine.readings == 2
        assert bench.watch.unseen == (START,), "that reading had begun before"
        await asyncio.sleep(2.0)
        assert bench.engine.readings == 3
        assert not bench.watch.unseen

    virtually(work)


def test_a_reading_that_fails_has_seen_nothing() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.watch.ended(START)
        bench.engine.go_away()
        await bench.look()
        assert "does not answer" in bench.watch.error
        assert bench.watch.unseen == (START,)
        bench.engine.come_back()
        await asyncio.sleep(1.0)
        await bench.look()
        assert bench.watch.is_fresh(SPEC, 10.0)
        assert bench.watch.error == ""
        assert not bench.watch.unseen

    virtually(work)


def test_a_thorough_look_waits_for_a_reading_that_began_after_what_is_known() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.reading_s = 1.0
        await asyncio.sleep(1.0)
        bench.watch.changed()
        await asyncio.sleep(0.5)
        bench.watch.changed()
        assert await bench.look(thorough=True) == pytest.approx(0.5 + engine_watch.REST_S[1] + 1.0)

    virtually(work)


def test_readings_of_other_files_are_not_planned_from() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.reading_s = 1.0
        await asyncio.sleep(1.0)
        assert await bench.look(Spec("p", {})) == 1.0

    virtually(work)


def test_what_is_too_old_is_not_planned_from() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.reading_s = 20.0
        await asyncio.sleep(1.0)
        bench.watch.changed()
        await asyncio.sleep(engine_watch.STALE_S - 0.1)
        assert await bench.look() < 1.0
        await asyncio.sleep(0.2)
        assert await bench.look() > 10.0

    virtually(work)


def test_an_engine_that_never_answers_is_away() -> None:
    async def work(bench: Bench) -> None:
        bench.engine.reading_s = 1e6
        assert await bench.look() == engine_watch.LIMIT_S
        assert bench.watch.error == "the Docker Engine does not answer within 50 s"

    virtually(work)


def test_a_defect_in_reading_is_every_looks_until_a_reading_succeeds() -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.breaks = KeyError("Names")
        bench.watch.changed()
        for _ in range(2):
            with pytest.raises(KeyError, match="Names"):
                await bench.look()
            await asyncio.sleep(LOOK_S)
        bench.engine.breaks = None
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
