"""When the GPUs' memory is read, and how long a reading is believed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from controller.model.observed import Observed
from controller.model.plan import Plan
from controller.model.spec import ServiceSpec, Spec
from controller.model.world import ContainerState, GpuReading, SleepReport
from controller.observe.gpu_memory import AWAITED, HOPELESS_S, RESTING_S, RETRY_S, WAITING_S, GpuMemoryWatch
from controller.outlive import Background
from tests.fakes.fake_engine import FakeEngine
from tests.unit.controller.worlds import gpu_service, gpus, observed, replica, retirement, service

RANKER = gpu_service()


WAITING, AT_REST = Plan(awaits_gpu_memory=True), Plan()


@dataclass
class Watched:
    """A watch on a fake engine, and a clock that stands until it is moved."""

    now: float = 1_000.0
    wakes: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    engine: FakeEngine = field(init=False)
    watch: GpuMemoryWatch = field(init=False)

    def __post_init__(self) -> None:
        self.engine = FakeEngine(lambda: self.now, gpus=gpus(1), gpu_memory={"GPU-0": 7})
        self.background = Background(self.spawn, self.wake, lambda: self.now)
        self.watch = GpuMemoryWatch(self.engine, self.background)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    def wake(self) -> None:
        self.wakes += 1

    async def reads(
        self, plan: Plan, *, after_s: float = 0.0, service: ServiceSpec = RANKER, world: Observed | None = None
    ) -> bool:
        """Whether a look at that time begins a reading; waits for its end."""
        self.now += after_s
        before = len(self.tasks)
        self.watch.refresh(Spec("p", {service.name: service}), world or observed(gpus=gpus(1)), plan)
        await asyncio.gather(*self.tasks)
        return len(self.tasks) > before


@pytest.fixture
def watched() -> Watched:
    return Watched()


async def test_a_reading_is_awaited_until_it_is_there_and_wakes(watched: Watched) -> None:
    assert watched.watch.seen(observed()).gpu_reading is AWAITED
    assert await watched.reads(WAITING)
    assert watched.wakes == 1
    assert watched.watch.seen(observed()).gpu_reading == GpuReading(1_000.0, {"GPU-0": 7})


async def test_a_start_that_waits_is_worth_a_reading_each_few_seconds_and_rest_one_a_minute(watched: Watched) -> None:
    assert await watched.reads(AT_REST)
    assert not await watched.reads(WAITING, after_s=WAITING_S - 0.1)
    assert await watched.reads(WAITING, after_s=0.1)
    assert not await watched.reads(AT_REST, after_s=RESTING_S - 0.1)
    assert await watched.reads(AT_REST, after_s=0.1)


async def test_one_reading_at_a_time_and_none_without_gpus_or_a_service_that_asks_for_them(watched: Watched) -> None:
    assert not await watched.reads(WAITING, service=service("web"))
    assert not await watched.reads(WAITING, world=observed())
    for _ in range(3):
        watched.watch.refresh(Spec("p", {"ranker": RANKER}), observed(gpus=gpus(1)), WAITING)
    assert len(watched.tasks) == 1
    await asyncio.gather(*watched.tasks)


async def test_where_the_engine_places_nothing_is_read_awaited_or_missed() -> None:
    watched = Watched()
    watched.engine.places = "the engine's"
    watched.watch = GpuMemoryWatch(watched.engine, watched.background)
    assert not await watched.reads(AT_REST)
    assert not await watched.reads(WAITING, after_s=HOPELESS_S)
    assert (watched.watch.problem, watched.watch.seen(observed(gpus=gpus(1))).gpu_reading) == ("", None)


@pytest.mark.parametrize("worked", [False, True])
async def test_what_cannot_be_read_is_said_and_tried_again_later(watched: Watched, worked: bool) -> None:
    if worked:
        await watched.reads(WAITING)
    watched.engine.gpu_memory = None
    assert await watched.reads(WAITING, after_s=WAITING_S)
    assert watched.watch.problem.startswith("nvidia-smi cannot be asked")
    assert watched.watch.seen(observed()).gpu_reading is None, "labels alone count"
    pause_s = RETRY_S if worked else HOPELESS_S
    assert not await watched.reads(WAITING, after_s=pause_s - 0.1)
    watched.engine.gpu_memory = {"GPU-0": 1}
    assert await watched.reads(WAITING, after_s=0.1)
    assert watched.watch.problem == ""
    assert watched.watch.seen(observed()).gpu_reading == GpuReading(watched.now, {"GPU-0": 1})


async def test_a_reading_from_before_a_holder_ended_is_not_believed(watched: Watched) -> None:
    holder = replica(RANKER, 1, gpus=("GPU-0",))
    ended = replace(holder, state=ContainerState.EXITED, exit_code=1)
    sleeper = replace(holder, sleep=SleepReport(can=True, wanted=True, asleep=True))
    its_mark = retirement(sleeper, sleeping_since=990.0)
    for before, after in (
        (observed(holder), observed(ended)),
        (observed(holder), observed()),
        (observed(holder), observed(sleeper, retirements=its_mark)),
        (observed(foreign_gpu_holders={"GPU-0": "train"}), observed()),
    ):
        await watched.reads(WAITING, after_s=WAITING_S)
        assert watched.watch.seen(before).gpu_reading is not AWAITED
        watched.now += 0.5
        assert watched.watch.seen(after).gpu_reading is AWAITED
        assert await watched.reads(WAITING), "at once, however short ago the last one was"
        assert watched.watch.seen(after).gpu_reading == GpuReading(watched.now, {"GPU-0": 7})
        assert watched.watch.seen(before).gpu_reading is not AWAITED, "a new holder changes nothing"


async def test_a_defect_in_reading_is_reported_and_tried_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def used_gpu_memory(engine: FakeEngine) -> dict[str, int]:
        raise KeyError("N/A")

    with monkeypatch.context() as patched:
        patched.setattr(FakeEngine, "used_gpu_memory", used_gpu_memory)
        assert await watched.reads(WAITING)
    assert watched.watch.problem == "internal: reading the memory of the GPUs raised KeyError: 'N/A'"
    assert watched.watch.seen(observed()).gpu_reading is None
    assert await watched.reads(WAITING, after_s=HOPELESS_S)
    assert watched.watch.problem == ""
