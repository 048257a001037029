"""GPUs that vanish, and GPUs on which replicas fail: marked, avoided, reported, and used again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from controller.engines.base import EngineAction
from controller.errors import InvalidRequest
from controller.model.actions import RemoveContainer
from controller.model.observed import Observed
from controller.model.world import Gpu, GpuFault, ReplicaContainer, ReplicaHealth
from controller.observe.gpu_faults import GONE_AFTER_S, STRIKES, GpuWatch, Unmark, with_fault
from controller.plan import plan
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.fakes.fake_swarm_engine import FakeSwarmEngine
from tests.harness.virtual_time import wall_clock
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import NOW, desired, gpu_service, gpus, observed, replica

pytestmark = pytest.mark.virtual_time

SPEC = gpu_service()
NO_FAULTS: Mapping[str, GpuFault] = {}


def world(*containers: ReplicaContainer, listed: tuple[Gpu, ...] = gpus(2)) -> Observed:
    return observed(*containers, specs=(SPEC,), gpus=listed)


def on(gpu: str, number: int = 1, **changes: object) -> ReplicaContainer:
    return replica(SPEC, number, gpus=(gpu,), **changes)


def marks(*changes: GpuFault | Unmark) -> list[tuple[str, str]]:
    """UUID and kind of each mark."""
    return [(change.uuid, change.kind) for change in changes if isinstance(change, GpuFault)]


class TestGone:
    def test_a_gpu_that_vanishes_from_under_a_replica_is_marked_after_a_while(self) -> None:
        watch, replicas = GpuWatch(), (on("GPU-0"), on("GPU-1", 2))
        assert watch.look(world(*replicas), NO_FAULTS, NOW) == ()
        left = world(*replicas, listed=gpus(1))
        for second in (1, GONE_AFTER_S):
            assert watch.look(left, NO_FAULTS, NOW + second) == ()
        (mark,) = watch.look(left, NO_FAULTS, NOW + 1 + GONE_AFTER_S)
        assert marks(mark) == [("GPU-1", "gone")]
        assert replicas[1].name in str(mark)

    @pytest.mark.parametrize(
        ("first", "later"),
        [(gpus(2), [gpus(1), gpus(2)]), (gpus(2), [()]), (gpus(2), [(Gpu("0"), Gpu("1"))]), (gpus(1), [gpus(1)])],
        ids=["the list is short now and then", "no GPU is listed", "they are listed by other names", "never seen"],
    )
    def test_a_list_that_is_wrong_marks_nothing(self, first: tuple[Gpu, ...], later: list[tuple[Gpu, ...]]) -> None:
        watch, replicas = GpuWatch(), (on("GPU-0"), on("GPU-1", 2))
        for second, listed in enumerate([first, *later * 10]):
            assert watch.look(world(*replicas, listed=listed), NO_FAULTS, NOW + 30.0 * second) == ()

    def test_a_gpu_that_is_back_is_used_again_unless_an_operator_has_marked_it(self) -> None:
        gone, marked = GpuFault("GPU-1", "no power", NOW, "gone"), GpuFault("GPU-1", "loud fan", NOW, "marked")
        for fault, changes in ((gone, (Unmark("GPU-1", "the engine lists it again"),)), (marked, ())):
            watch, faults = GpuWatch(), {"GPU-1": fault}
            assert watch.look(world(listed=gpus(1)), faults, NOW) == ()
            assert watch.look(world(), faults, NOW) == changes

    def test_a_replica_can_stay_on_a_gpu_unless_it_is_gone(self) -> None:
        gone = {"GPU-1": GpuFault("GPU-1", "the engine does not list it any more", NOW, "gone")}
        assert with_fault(on("GPU-1"), gone).gpu_fault == "its GPU GPU-1 is gone: the engine does not list it any more"
        assert with_fault(on("GPU-0"), gone).gpu_fault == ""
        assert with_fault(on("GPU-1"), {"GPU-1": GpuFault("GPU-1", "loud fan", NOW, "marked")}).gpu_fault == ""


def after_failures(gpu: str, times: int = STRIKES) -> GpuWatch:
    watch = GpuWatch()
    for _ in range(times):
        watch.failed(KEY, (gpu,))
    return watch


DEAD = on("GPU-0", health=ReplicaHealth.UNKNOWN)
KEY = (DEAD.service, DEAD.version)


class TestFailing:
    def test_failures_in_a_row_while_another_gpu_works_mark_it(self) -> None:
        watch = after_failures("GPU-0", STRIKES - 1)
        assert watch.look(world(DEAD, on("GPU-1", 2)), NO_FAULTS, NOW) == ()
        watch.failed(KEY, ("GPU-0",))
        (mark,) = watch.look(world(DEAD, on("GPU-1", 2)), NO_FAULTS, NOW)
        reason = "replicas of ranker failed on it 3 times in a row, and work on GPU-1"
        assert mark == GpuFault("GPU-0", reason, NOW, "failing")

    def test_failures_of_a_version_on_trial_do_not_count_against_its_gpu(self) -> None:
        watch = after_failures("GPU-0")
        assert watch.look(world(DEAD), NO_FAULTS, NOW, {"ranker": "another"}) == ()
        assert marks(*watch.look(world(DEAD), NO_FAULTS, NOW, {"ranker": DEAD.version})) == [("GPU-0", "failing")]

    def test_a_replica_that_works_in_between_restarts_the_count(self) -> None:
        watch = after_failures("GPU-0", STRIKES - 1)
        watch.look(world(on("GPU-0"), on("GPU-1", 2)), NO_FAULTS, NOW)
        watch.failed(KEY, ("GPU-0",))
        assert watch.look(world(DEAD, on("GPU-1", 2)), NO_FAULTS, NOW) == ()

    def test_the_only_gpu_is_never_given_up(self) -> None:
        assert after_failures("GPU-0", 10).look(world(DEAD, listed=gpus(1)), NO_FAULTS, NOW) == ()

    def test_a_version_that_fails_on_every_gpu_marks_none(self) -> None:
        watch = after_failures("GPU-0")
        (mark,) = watch.look(world(DEAD), NO_FAULTS, NOW)
        assert isinstance(mark, GpuFault)
        faults = {"GPU-0": mark}
        for _ in range(STRIKES):
            assert watch.look(world(DEAD), faults, NOW) == ()
            watch.failed(KEY, ("GPU-1",))
        (unmark,) = watch.look(world(DEAD), faults, NOW)
        assert isinstance(unmark, Unmark)
        assert "fails on other GPUs as well" in unmark.why
        assert watch.look(world(DEAD), NO_FAULTS, NOW) == ()


class TestPlan:
    SPEC = gpu_service(replicas=1)

    def planned(self, *replicas: ReplicaContainer, listed: int) -> str:
        """The plan where GPU-0 is marked."""
        marked = observed(*replicas, specs=(self.SPEC,), gpus=gpus(listed), gpu_faults={"GPU-0": "it fell off the bus"})
        return str(plan(desired(self.SPEC), marked, NOW))

    def on_the_marked(self, **changes: object) -> ReplicaContainer:
        return replica(self.SPEC, 1, gpus=("GPU-0",), gpu_fault="its GPU GPU-0 is gone", **changes)

    def test_no_replica_is_placed_on_a_marked_gpu(self) -> None:
        assert "GPU-1" in self.planned(listed=2)
        assert "GPU-0" not in self.planned(listed=2)
        assert "not used because of a fault: GPU-0" in self.planned(listed=1)

    @pytest.mark.parametrize(("health", "leaves"), [(ReplicaHealth.READY, False), (ReplicaHealth.FAILED, True)])
    def test_without_a_free_gpu_it_stays_for_as_long_as_it_answers(self, health: ReplicaHealth, leaves: bool) -> None:
        lost = self.on_the_marked(health=health)
        assert (lost.name in self.planned(lost, listed=1)) is leaves


async def test_a_gpu_that_vanishes_is_marked_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.observe.gpu_faults.GONE_AFTER_S", 0.2)
    control = Control.of(tmp_path, gpu_service(replicas=2))
    control.engine.gpus = gpus(3)
    async with control.running(ranker=2) as controller:
        control.engine.gpus = (Gpu("GPU-0"), Gpu("GPU-2"))
        controller.observer.engine.changed()
        await until(lambda: "gpu_marked" in control.kinds(), within_s=10.0)
        await until(lambda: {"GPU-0", "GPU-2"} == {u for c in control.engine.containers.values() for u in c.gpus})
        await control.settled("ranker", 2)
        assert any("GPU GPU-1 is not used" in notice for notice in controller.view.notices)
        assert [gpu.uuid for gpu in controller.view.gpus if gpu.fault] == ["GPU-1"]
        assert b"pierhead_gpu_faults 1.0" in controller.publisher.metrics.page()
        control.engine.gpus = gpus(3)
        controller.observer.engine.changed()
        await until(lambda: "gpu_unmarked" in control.kinds(), within_s=5.0)
        await until(lambda: not any("is not used" in notice for notice in controller.view.notices))


@pytest.mark.parametrize("is_forgotten_early", [False, True])
async def test_a_gpu_on_which_replicas_die_is_left_for_one_on_which_they_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_forgotten_early: bool
) -> None:
    """Forgotten early: a snapshot without the replica comes before its removal has ended."""
    control = Control.of(tmp_path, gpu_service(replicas=1))
    control.engine.gpus = gpus(2)
    control.engine.bad_gpus = {"GPU-0": Behaviour(exits_after_s=0.0, exit_code=1, output="CUDA error 719\n")}
    at_once = FakeEngine.perform

    async def late(engine: FakeEngine, action: EngineAction, project: str) -> None:
        await at_once(engine, action, project)
        if isinstance(action, RemoveContainer):
            await until(lambda: action.container_id not in seen())

    def seen() -> set[str]:
        return {one.id for one in control.view.observed.containers}

    if is_forgotten_early:
        monkeypatch.setattr(FakeEngine, "perform", late)
    async with control.running() as controller:
        await control.settled("ranker", 1, within_s=20.0)
        assert {u for c in control.engine.containers.values() for u in c.gpus} == {"GPU-1"}
        assert list(control.store.gpu_faults) == ["GPU-0"]
        controller.commands.unmark_gpu("GPU-0")
        assert dict(control.store.gpu_faults) == {}


async def test_an_operator_marks_gpus_and_removes_the_marks(tmp_path: Path) -> None:
    control = Control.of(tmp_path, gpu_service(replicas=1))
    control.engine.gpus = gpus(2)
    async with control.running(ranker=1) as controller:
        held = control.engine.containers.copy()
        with pytest.raises(InvalidRequest, match="no GPU 'GPU-7'; this machine has GPU-0, GPU-1"):
            controller.commands.mark_gpu("GPU-7", "loud fan")
        with pytest.raises(InvalidRequest, match="GPU-0 has no mark; with one: none"):
            controller.commands.unmark_gpu("GPU-0")
        controller.commands.mark_gpu("GPU-0", "loud fan")
        controller.commands.mark_gpu("GPU-1", "loud fan")
        controller.commands.scale("ranker", 2)
        await until(lambda: any("not used because of a fault" in row.message for row in controller.view.services))
        assert set(control.engine.containers) == set(held), "replicas stay where they are"
        controller.commands.unmark_gpu("GPU-1")
        controller.commands.unmark_gpu("GPU-0")
        await control.settled("ranker", 2)


async def test_no_gpu_is_marked_where_the_engine_chooses_gpus(tmp_path: Path) -> None:
    engine = FakeSwarmEngine(wall_clock)
    for name in ("n1", "n2"):
        engine.add_node(name, 1)
    engine.bad_gpus = {"GPU-n1-1": Behaviour(exits_after_s=0.0, exit_code=1)}
    control = Control.of(tmp_path, gpu_service(replicas=1), engine=engine)
    async with control.running() as controller:
        await until(lambda: len(control.said("replica_failed")) > STRIKES, within_s=60.0)
        with pytest.raises(InvalidRequest, match=r"GPU-n1-1 cannot be marked on a Swarm.* `pierhead node drain n1`"):
            controller.commands.mark_gpu("GPU-n1-1", "loud fan")
        assert dict(control.store.gpu_faults) == {}
