"""One look: how long it waits for engine and HAProxy together, and when the list of replicas to probe is renewed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from controller.model.spec import Spec
from controller.model.world import Retirement
from controller.observe.gpu_marks import GpuMarks
from controller.observe.gpu_memory import GpuMemoryWatch
from controller.observe.judge import ProbeReading
from controller.observe.prober import Prober
from controller.observe.router_silence import RouterWatch
from controller.observe.snapshot import Observer, engine_watch
from controller.outlive import Background
from controller.storage.events import EventLog
from controller.storage.file import StateFile
from controller.storage.store import StateStore
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_router import FakeRouter

pytestmark = pytest.mark.virtual_time

SPEC = Spec("p", {})


class NotingProber(Prober):
    """Notes which replicas retire in each list that it gets."""

    def __init__(self) -> None:
        async def ask(subject: object) -> ProbeReading:
            raise AssertionError(f"there are no replicas: {subject}")

        super().__init__(ask, Background(asyncio.create_task, lambda: None))
        self.retiring: list[set[str]] = []

    def sync(self, *arguments: Any) -> None:
        self.retiring.append(set(arguments[2]))
        super().sync(*arguments)


class Bench:
    """An observer with its collaborators."""

    def __init__(self, directory: Path) -> None:
        clock = asyncio.get_running_loop().time
        self.engine, self.router = FakeEngine(clock), FakeRouter()
        self.store, self.prober = StateStore(StateFile(directory)), NotingProber()
        background = Background(asyncio.create_task, lambda: None, clock)
        memory = GpuMemoryWatch(self.engine, background)
        marks = GpuMarks(self.store, EventLog(self.store, clock), dict, lambda: None)
        engine, router = engine_watch(self.engine, self.store, background), RouterWatch(self.router, background)
        self.observer = Observer(engine, router, self.prober, self.store, memory, marks, clock)
        self.observer.stream_open = True

    async def look(self, spec: Spec = SPEC) -> float:
        """Look; return how long that took."""
        now = asyncio.get_running_loop().time
        begun = now()
        await self.observer.look(spec, ())
        return now() - begun


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """An observer that has looked once."""
    bench = Bench(tmp_path)
    tasks = [asyncio.create_task(bench.observer.engine.run()), asyncio.create_task(bench.observer.router.run())]
    await bench.look()
    yield bench
    for task in tasks:
        task.cancel()
    bench.store.close()


async def test_a_look_waits_for_engine_and_haproxy_at_the_same_time(bench: Bench) -> None:
    await asyncio.sleep(1.0)
    bench.engine.reading_s, bench.router.reading_s = 0.04, 0.015
    bench.observer.engine.changed()
    assert await bench.look() == pytest.approx(0.04)
    await asyncio.sleep(1.0)
    assert await bench.look() == pytest.approx(0.015), "nothing new of the engine"


async def test_a_look_does_not_wait_for_parts_whose_last_reading_was_slow(bench: Bench) -> None:
    bench.engine.reading_s = bench.router.reading_s = 0.5
    bench.observer.engine.changed()
    await bench.look()
    await asyncio.sleep(2.0)
    await bench.look()
    bench.observer.engine.changed()
    await asyncio.sleep(1.0)
    bench.observer.engine.changed()
    assert await bench.look() == 0.0


async def test_the_prober_gets_a_new_list_only_when_something_of_it_is_new(bench: Bench) -> None:
    await bench.look()
    assert bench.prober.retiring == [set()]
    bench.store.retire(Retirement("p-web-1", "c1", 0.0, None, "scale down"))
    for _ in range(3):
        await bench.look()
    assert bench.prober.retiring == [set(), {"c1"}], "at once, without another reading of the engine"
    other = Spec("p", {})
    await bench.look(other)
    assert len(bench.prober.retiring) == 3, "other files"
    bench.observer.engine.changed()
    await bench.look(other)
    assert len(bench.prober.retiring) == 4, "another reading"
