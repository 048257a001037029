"""GPUs that vanish, and GPUs on which replicas fail: marked, avoided, reported, and used again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from controller.engines.base import EngineAction
from controller.errors import InvalidRequest
from controller.model.actions import RemoveContainer
from controller.model.observed import Observed
from controller.model.world import Gpu, GpuFault, Health, ReplicaContainer
from controller.observe.gpu_faults import GONE_AFTER_S, STRIKES, GpuWatch, Mark, Unmark, struck
from controller.plan import plan
from controller.storage.store import Store
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import NOW, desired, gpu_service, gpus, observed, replica

pytestmark = pytest.mark.virtual_time

SPEC = gpu_service()
NO_FAULTS: Mapping[str, GpuFault] = {}


def world(*containers: ReplicaContainer, listed: tuple[Gpu, ...] = gpus(2)) -> Observed:
    return observed(*containers, specs=(SPEC,), gpus=listed)


def on(gpu: str, number: int = 1, **changes: object) -> ReplicaContainer:
    return replica(SPEC, number, gpus=(gpu,), **changes)


def gone(uuid: str) -> dict[str, GpuFault]:
    return {uuid: GpuFault(uuid, "the engine does not list it any more", NOW, "gone")}


class TestGone:
    def test_one_that_vanishes_from_under_a_replica_is_marked_after_a_while(self) -> None:
        watch, replicas = GpuWatch(), (on("GPU-0"), on("GPU-1", 2))
        assert watch.look(world(*replicas), NO_FAULTS, NOW) == ()
        left = world(*replicas, listed=gpus(1))
        assert watch.look(left, NO_FAULTS, NOW + 1) == ()
        assert watch.look(left, NO_FAULTS, NOW + GONE_AFTER_S) == ()
        (mark,) = watch.look(left, NO_FAULTS, NOW + 1 + GONE_AFTER_S)
        assert isinstance(mark, Mark)
        assert (mark.fault.uuid, mark.fault.kind) == ("GPU-1", "gone")
        assert replicas[1].name in mark.fault.reason

    def test_a_list_that_is_short_for_a_moment_marks_nothing(self) -> None:
        watch, held = GpuWatch(), on("GPU-1")
        for second in range(0, 600, 30):
            listed = gpus(1) if second % 60 else gpus(2)
            assert watch.look(world(held, listed=listed), NO_FAULTS, NOW + second) == ()

    @pytest.mark.parametrize("listed", [(), (Gpu("0"), Gpu("1"))], ids=["nothing is listed", "other names"])
    def test_when_all_vanish_it_is_the_list(self, listed: tuple[Gpu, ...]) -> None:
        watch = GpuWatch()
        watch.look(world(on("GPU-0"), on("GPU-1", 2)), NO_FAULTS, NOW)
        for second in (1, 100, 1000):
            assert watch.look(world(on("GPU-0"), on("GPU-1", 2), listed=listed), NO_FAULTS, NOW + second) == ()

    def test_one_that_this_controller_never_saw_has_not_vanished(self) -> None:
        watch = GpuWatch()
        for second in (0, 100, 1000):
            assert watch.look(world(on("GPU-9")), NO_FAULTS, NOW + second) == ()

    def test_it_is_used_again_when_it_is_back(self) -> None:
        watch = GpuWatch()
        assert watch.look(world(listed=gpus(1)), gone("GPU-1"), NOW) == ()
        assert watch.look(world(), gone("GPU-1"), NOW) == (Unmark("GPU-1", "the engine lists it again"),)

    def test_what_somebody_has_marked_stays_marked(self) -> None:
        watch, faults = GpuWatch(), {"GPU-1": GpuFault("GPU-1", "loud fan", NOW, "marked")}
        for listed in (gpus(1), gpus(2)):
            assert watch.look(world(listed=listed), faults, NOW) == ()


def after_failures(watch: GpuWatch, gpu: str, times: int = STRIKES) -> None:
    for _ in range(times):
        watch.failed(on(gpu))


class TestFailing:
    def test_failures_in_a_row_while_another_gpu_works_mark_it(self) -> None:
        watch, dead = GpuWatch(), on("GPU-0", health=Health.UNKNOWN)
        after_failures(watch, "GPU-0", STRIKES - 1)
        assert watch.look(world(dead, on("GPU-1", 2)), NO_FAULTS, NOW) == ()
        after_failures(watch, "GPU-0", 1)
        (mark,) = watch.look(world(dead, on("GPU-1", 2)), NO_FAULTS, NOW)
        assert isinstance(mark, Mark)
        assert mark.fault.kind == "failing"
        assert mark.fault.reason == "replicas of ranker failed on it 3 times in a row, and work on GPU-1"

    def test_a_version_on_trial_says_nothing_of_its_gpu(self) -> None:
        watch, dead = GpuWatch(), on("GPU-0", health=Health.UNKNOWN)
        after_failures(watch, "GPU-0")
        assert watch.look(world(dead), NO_FAULTS, NOW, {"ranker": "another"}) == ()
        (mark,) = watch.look(world(dead), NO_FAULTS, NOW, {"ranker": dead.version})
        assert isinstance(mark, Mark)

    def test_one_that_works_in_between_begins_anew(self) -> None:
        watch = GpuWatch()
        after_failures(watch, "GPU-0", STRIKES - 1)
        watch.look(world(on("GPU-0"), on("GPU-1", 2)), NO_FAULTS, NOW)
        after_failures(watch, "GPU-0", 1)
        assert watch.look(world(on("GPU-0", health=Health.UNKNOWN), on("GPU-1", 2)), NO_FAULTS, NOW) == ()

    def test_the_only_gpu_is_never_given_up(self) -> None:
        watch, dead = GpuWatch(), on("GPU-0", health=Health.UNKNOWN)
        after_failures(watch, "GPU-0", 10)
        assert watch.look(world(dead, listed=gpus(1)), NO_FAULTS, NOW) == ()

    def test_a_version_that_fails_everywhere_is_to_blame_itself(self) -> None:
        watch, dead = GpuWatch(), on("GPU-0", health=Health.UNKNOWN)
        after_failures(watch, "GPU-0")
        (mark,) = watch.look(world(dead), NO_FAULTS, NOW)
        assert isinstance(mark, Mark)
        faults = {"GPU-0": mark.fault}
        after_failures(watch, "GPU-1", STRIKES - 1)
        assert watch.look(world(dead), faults, NOW) == ()
        after_failures(watch, "GPU-1", 1)
        (unmark,) = watch.look(world(dead), faults, NOW)
        assert isinstance(unmark, Unmark)
        assert "fails on other GPUs as well" in unmark.why
        assert watch.look(world(dead), NO_FAULTS, NOW) == ()


class TestPlan:
    def test_no_replica_is_placed_on_a_marked_one(self) -> None:
        spec = gpu_service(replicas=1)
        marked = observed(specs=(spec,), gpus=gpus(2), gpu_faults={"GPU-0": "it fell off the bus"})
        text = str(plan(desired(spec), marked, NOW))
        assert "GPU-1" in text
        assert "GPU-0" not in text

    def test_who_waits_is_told_which_are_not_used(self) -> None:
        spec = gpu_service(replicas=1)
        marked = observed(specs=(spec,), gpus=gpus(1), gpu_faults={"GPU-0": "it fell off the bus"})
        assert "not used because of a fault: GPU-0" in str(plan(desired(spec), marked, NOW))

    def test_a_replica_whose_gpu_is_gone_goes_where_one_is_free(self) -> None:
        spec = gpu_service(replicas=1)
        lost = replica(spec, 1, gpus=("GPU-0",), gpu_fault="its GPU GPU-0 is gone")
        faults = {"GPU-0": "gone"}
        text = str(plan(desired(spec), observed(lost, specs=(spec,), gpus=gpus(2), gpu_faults=faults), NOW))
        assert "its GPU GPU-0 is gone" in text
        assert "GPU-1" in text

    def test_without_another_one_it_stays_for_as_long_as_it_answers(self) -> None:
        spec = gpu_service(replicas=1)
        faults = {"GPU-0": "gone"}
        for health, leaves in ((Health.READY, False), (Health.FAILED, True)):
            lost = replica(spec, 1, gpus=("GPU-0",), gpu_fault="its GPU GPU-0 is gone", health=health)
            text = str(plan(desired(spec), observed(lost, specs=(spec,), gpus=gpus(1), gpu_faults=faults), NOW))
            assert (lost.name in text) is leaves

    def test_only_what_is_gone_strikes_the_replica_on_it(self) -> None:
        assert struck(on("GPU-1"), gone("GPU-1")).startswith("its GPU GPU-1 is gone: ")
        assert struck(on("GPU-0"), gone("GPU-1")) == ""
        assert struck(on("GPU-1"), {"GPU-1": GpuFault("GPU-1", "loud fan", NOW, "marked")}) == ""


def test_marks_outlive_the_controller(tmp_path: Path) -> None:
    fault = GpuFault("GPU-1", "it fell off the bus", 12.5, "gone")
    store = Store(tmp_path)
    store.mark_gpu(GpuFault("GPU-1", "another reason", 1.0, "failing"))
    store.mark_gpu(fault)
    store.close()
    store = Store(tmp_path)
    assert dict(store.gpu_faults) == {"GPU-1": fault}
    store.unmark_gpu("GPU-1")
    store.unmark_gpu("GPU-1")
    store.close()
    assert dict(Store(tmp_path).gpu_faults) == {}


async def test_a_gpu_that_vanishes_is_marked_and_its_replica_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.observe.gpu_faults.GONE_AFTER_S", 0.2)
    control = Control.of(tmp_path, gpu_service(replicas=2))
    control.engine.gpus = gpus(3)
    async with control.running() as controller:
        await control.settled("ranker", 2)
        control.engine.gpus = (Gpu("GPU-0"), Gpu("GPU-2"))
        controller.observer.engine_changed()
        await until(lambda: "gpu_marked" in control.kinds(), within_s=10.0)
        await until(lambda: {"GPU-0", "GPU-2"} == {u for c in control.engine.containers.values() for u in c.gpus})
        await control.settled("ranker", 2)
        assert any("GPU GPU-1 is not used" in notice for notice in controller.view.notices)
        assert [gpu.uuid for gpu in controller.view.gpus if gpu.fault] == ["GPU-1"]
        assert b"pierhead_gpu_faults 1.0" in controller.publisher.metrics.page()
        control.engine.gpus = gpus(3)
        controller.observer.engine_changed()
        await until(lambda: "gpu_unmarked" in control.kinds(), within_s=5.0)
        await until(lambda: not any("is not used" in notice for notice in controller.view.notices))


async def test_a_gpu_on_which_replicas_die_is_left_for_one_on_which_they_live(tmp_path: Path) -> None:
    control = Control.of(tmp_path, gpu_service(replicas=1))
    control.engine.gpus = gpus(2)
    control.engine.bad_gpus = {"GPU-0": Behaviour(exits_after_s=0.0, exit_code=1, output="CUDA error 719\n")}
    async with control.running() as controller:
        await control.settled("ranker", 1, within_s=15.0)
        assert {u for c in control.engine.containers.values() for u in c.gpus} == {"GPU-1"}
        assert list(control.store.gpu_faults) == ["GPU-0"]
        controller.commands.unmark_gpu("GPU-0")
        assert dict(control.store.gpu_faults) == {}


async def test_a_failure_counts_although_the_world_forgets_the_replica_before_its_removal_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control.of(tmp_path, gpu_service(replicas=1))
    control.engine.gpus = gpus(2)
    control.engine.bad_gpus = {"GPU-0": Behaviour(exits_after_s=0.0, exit_code=1, output="CUDA error 719\n")}
    at_once = FakeEngine.perform

    async def late(engine: FakeEngine, action: EngineAction, project: str) -> None:
        await at_once(engine, action, project)
        if isinstance(action, RemoveContainer):
            await until(lambda: action.container_id not in seen())

    def seen() -> set[str]:
        return {one.id for one in control.view.observed.containers} if control.view.observed else set()

    monkeypatch.setattr(FakeEngine, "perform", late)
    async with control.running():
        await control.settled("ranker", 1, within_s=20.0)
        assert {u for c in control.engine.containers.values() for u in c.gpus} == {"GPU-1"}
        assert list(control.store.gpu_faults) == ["GPU-0"]


async def test_somebody_may_mark_a_gpu(tmp_path: Path) -> None:
    control = Control.of(tmp_path, gpu_service(replicas=1))
    control.engine.gpus = gpus(2)
    async with control.running() as controller:
        await control.settled("ranker", 1)
        held = control.engine.containers.copy()
        with pytest.raises(InvalidRequest, match="no GPU 'GPU-7'; this machine has GPU-0, GPU-1"):
            controller.commands.mark_gpu("GPU-7", "loud fan")
        with pytest.raises(InvalidRequest, match="GPU-0 has no mark; with one: none"):
            controller.commands.unmark_gpu("GPU-0")
        controller.commands.mark_gpu("GPU-0", "loud fan")
        controller.commands.mark_gpu("GPU-1", "loud fan")
        controller.commands.scale("ranker", 2)
        await until(lambda: any("not used because of a fault" in row.message for row in controller.view.services))
        assert set(control.engine.containers) == set(held), "what is there stays"
        controller.commands.unmark_gpu("GPU-1")
        controller.commands.unmark_gpu("GPU-0")
        await control.settled("ranker", 2)
