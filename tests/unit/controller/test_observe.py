"""One look: how long it waits for engine and HAProxy together, and when it says anew who is asked and how."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from controller.model.spec import ServiceSpec, Spec
from controller.model.world import ReplicaContainer, Retirement
from controller.observe.gpu_marks import GpuMarks
from controller.observe.gpu_memory import GpuMemoryWatch
from controller.observe.probe import Prober, Reading
from controller.observe.snapshot import Observer
from controller.storage.events import EventLog
from controller.storage.store import Store
from tests.fakes.fake_engine import FakeEngine
from tests.harness.virtual_time import VirtualLoop
from tests.unit.controller.control import FakeRouter

SPEC = Spec("p", {})


class Told(Prober):
    """Notes who retires each time it is told whom to ask."""

    def __init__(self) -> None:
        async def nobody(subject: object) -> Reading:
            raise AssertionError(f"there is nobody to ask: {subject}")

        super().__init__(nobody, asyncio.create_task, lambda: None)
        self.retiring: list[set[str]] = []

    def sync(
        self,
        containers: Iterable[ReplicaContainer],
        services: Mapping[str, ServiceSpec],
        retiring: Collection[str],
        outdated: Collection[str] = (),
    ) -> None:
        self.retiring.append(set(retiring))
        super().sync(containers, services, retiring, outdated)


class Bench:
    """An observer that runs, and whoever looks."""

    def __init__(self, directory: Path) -> None:
        clock = asyncio.get_running_loop().time
        self.engine, self.router = FakeEngine(clock), FakeRouter()
        self.store, self.prober = Store(directory), Told()
        events = EventLog(self.store, clock)
        memory = GpuMemoryWatch(self.engine, asyncio.create_task, lambda: None, clock)
        marks = GpuMarks(self.store, events, dict, lambda: None)
        self.observer = Observer(
            self.engine, self.router, self.prober, self.store, memory, marks, lambda: None, clock=clock
        )
        self.observer.stream_open = True

    async def look(self, spec: Spec = SPEC) -> float:
        """Look; return how long that took."""
        now = asyncio.get_running_loop().time
        begun = now()
        await self.observer.look(spec, ())
        return now() - begun


def virtually(directory: Path, work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench(directory)
        tasks = [asyncio.create_task(bench.observer.run()), asyncio.create_task(bench.observer.run_router())]
        try:
            await work(bench)
        finally:
            for task in tasks:
                task.cancel()
            bench.store.close()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_engine_and_haproxy_are_waited_for_together(tmp_path: Path) -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        await asyncio.sleep(1.0)
        bench.engine.reading_s, bench.router.reading_s = 0.04, 0.015
        bench.observer.engine_changed()
        assert await bench.look() == pytest.approx(0.04)
        await asyncio.sleep(1.0)
        assert await bench.look() == pytest.approx(0.015), "nothing new of the engine"

    virtually(tmp_path, work)


def test_neither_is_waited_for_that_was_slow_when_it_was_asked_last(tmp_path: Path) -> None:
    async def work(bench: Bench) -> None:
        await bench.look()
        bench.engine.reading_s = bench.router.reading_s = 0.5
        bench.observer.engine_changed()
        await bench.look()
        await asyncio.sleep(2.0)
        await bench.look()
        bench.observer.engine_changed()
        await asyncio.sleep(1.0)
        bench.observer.engine_changed()
        assert await bench.look() == 0.0

    virtually(tmp_path, work)


def test_who_is_asked_how_is_told_again_only_when_something_of_it_is_new(tmp_path: Path) -> None:
    async def work(bench: Bench) -> None:
        for _ in range(3):
            await bench.look()
        assert bench.prober.retiring == [set()]
        bench.store.retire(Retirement("p-web-1", "c1", 0.0, None, "scale down"))
        for _ in range(3):
            await bench.look()
        assert bench.prober.retiring == [set(), {"c1"}], "at once, without another reading of the engine"
        other = Spec("p", {})
        await bench.look(other)
        assert len(bench.prober.retiring) == 3, "other files"
        bench.observer.engine_changed()
        await bench.look(other)
        assert len(bench.prober.retiring) == 4, "another reading"

    virtually(tmp_path, work)
