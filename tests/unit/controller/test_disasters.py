"""What breaks around the controller: its disk, the engine's disk, the engine, images. It does what can be done."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from controller.daemon.assembly import Controller
from controller.engines.docker_errors import refusal
from controller.errors import AnotherController, EngineError, StoreError
from controller.model.actions import CreateContainer
from controller.model.world import GpuFault
from controller.swarm.state.lease import HOLD_S
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.fakes.fake_swarm_configs import FakeSwarm
from tests.fakes.fake_swarm_engine import FakeSwarmEngine
from tests.harness.virtual_time import wall_clock
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import gpus, service

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def control(tmp_path: Path) -> Control:
    """Two replicas of `web`."""
    return Control.of(tmp_path, service("web"))


async def test_a_state_file_that_cannot_be_written_stops_nothing_and_is_reported(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web"), service("bad", replicas=1))
    async with control.running(web=2, bad=1) as controller:
        control.set_disk_full(True)
        control.engine.crash(control.router.ready("web")[0], code=3)
        await until(lambda: "store_failing" in control.kinds())
        await control.settled("web", 2)
        assert any("look at the disk of the controller's state volume" in notice for notice in controller.view.notices)
        with pytest.raises(StoreError, match="state volume"):
            controller.commands.scale("web", 3)
        assert control.row("web")[0] == 2, "a number that could not be kept does not count"
        hangs = control.router.ready("web")[0]
        container = control.engine.by_name(hangs).id
        control.engine.hang(hangs)
        control.router.mark_down(hangs)
        await until(lambda: container not in control.engine.containers, within_s=20.0)
        await control.settled("web", 2)
        control.engine.behaviours["bad"] = Behaviour(exits_after_s=0.0, exit_code=1)
        control.engine.crash(control.router.ready("bad")[0])
        await until(lambda: any(record.count >= 3 for record in control.store.failures.values()))
        assert "tick_failed" not in control.kinds()
        control.set_disk_full(False)
        await until(lambda: "store_works" in control.kinds())
        await until(lambda: not any("state volume" in notice for notice in controller.view.notices))
        assert {mark.replica for mark in control.store.retirements.values()} <= {*control.engine.names()} - {hangs}
        controller.commands.scale("web", 3)
        await control.settled("web", 3)
    async with control.running(web=3):
        assert any(record.count >= 3 for (name, _), record in control.store.failures.items() if name == "bad")
        assert {"store_failing", "store_works"} <= set(control.kinds()), "events of that time are kept, too"


async def test_a_controller_that_is_cut_off_stops_before_another_one_acts(control: Control) -> None:
    control.swarm = FakeSwarm()
    other = replace(control)

    async def is_cut_off(first: Controller) -> None:
        await control.settled("web", 2)
        first.commands.scale("web", 3)
        await first.commands.stored()
        await control.settled("web", 3)
        control.manager.is_cut = True
        await asyncio.sleep(HOLD_S)
        control.engine.crash(control.router.ready("web")[0])
        with pytest.raises(StoreError):
            first.commands.scale("web", 9)
        await asyncio.sleep(1.0)
        assert not first.view.plan.steps
        assert any("no state can be saved" in notice for notice in first.view.notices)
        async with other.running(web=3):
            control.manager.is_cut = False
            await asyncio.sleep(60)

    async def live() -> None:
        async with control.running() as first:
            await is_cut_off(first)

    with pytest.raises(ExceptionGroup) as ended:
        await live()
    assert ended.group_contains(AnotherController)


async def test_a_gpu_mark_that_cannot_be_kept_is_refused(control: Control) -> None:
    control.engine.gpus = gpus(2)
    async with control.running(web=2) as controller:
        controller.commands.mark_gpu("GPU-1", "loud fan")
        control.set_disk_full(True)
        with pytest.raises(StoreError, match="state volume"):
            controller.commands.mark_gpu("GPU-0", "loud fan")
        with pytest.raises(StoreError, match="state volume"):
            controller.commands.unmark_gpu("GPU-1")
        assert set(control.store.gpu_faults) == {"GPU-1"}
        control.store.mark_gpu(GpuFault("GPU-0", "the engine does not list it any more", 1.0, "gone"))
        assert set(control.store.gpu_faults) == {"GPU-0", "GPU-1"}, "a fault that has happened counts all the same"
        control.set_disk_full(False)
        controller.commands.mark_gpu("GPU-0", "loud fan")
        controller.commands.unmark_gpu("GPU-1")
        await until(lambda: not controller.publisher.store_trouble)
    async with control.running():
        assert {uuid: fault.kind for uuid, fault in control.store.gpu_faults.items()} == {"GPU-0": "marked"}


@pytest.mark.parametrize("engine_is_read", [True, False])
async def test_a_replica_that_loses_its_network_is_replaced_whether_or_not_the_engine_is_read(
    control: Control, engine_is_read: bool
) -> None:
    async with control.running(web=2) as controller:
        victim = control.router.ready("web")[0]
        container = control.engine.by_name(victim).id
        control.engine.lose_network(victim)
        control.router.mark_down(victim)
        if engine_is_read:
            control.engine.add_image("image/another")  # an event, so the engine is read again
            others = [name for name in control.engine.names() if name != victim]
            await until(lambda: control.router.ready("web") == others)
            assert victim not in {endpoint.replica for endpoint in controller.view.endpoints["web"].endpoints}
        await until(lambda: container not in control.engine.containers, within_s=10.0)
        await control.settled("web", 2)
        said = [event.message for event in control.events()]
        assert not [message for message in said if "another one has its name" in message]
        if engine_is_read:
            assert any("bad answers in a row, the last: it has no network address" in message for message in said)
            assert any(message.endswith("the replica has lost its network address") for message in said)


async def test_a_replica_whose_network_comes_back_in_time_continues(control: Control) -> None:
    async with control.running(web=2):
        victim = control.router.ready("web")[0]
        container = control.engine.by_name(victim).id
        control.engine.lose_network(victim)
        control.engine.add_image("image/another")
        await until(lambda: victim not in control.router.ready("web"))
        control.engine.regain_network(victim)
        control.engine.add_image("image/another")
        await until(lambda: victim in control.router.ready("web"))
        await asyncio.sleep(10.0)
        await control.settled("web", 2)
        assert control.engine.by_name(victim).id == container
        assert control.kinds("failed") == []


async def test_an_engine_without_disk_is_named_and_tried_again(control: Control) -> None:
    said = "failed to create rwlayer: mkdir /var/lib/docker/overlay2/x: no space left on device"
    for _ in range(2):
        control.engine.fail_next(CreateContainer, EngineError(refusal("create of replica p-web-1", said)))
    async with control.running():
        await until(lambda: "create_container" in control.kinds("failed"))
        failed = next(event.message for event in control.events() if event.outcome == "failed")
        assert "no space left on device" in failed
        assert "`docker system df`" in failed
        await control.settled("web", 2, within_s=10.0)


async def test_after_an_engine_restart_all_replicas_come_back(tmp_path: Path) -> None:
    """Without live-restore every container has ended, the controller's own included."""
    control = Control.of(tmp_path, service("web", replicas=6), service("api", replicas=1))
    async with control.running():
        await control.settled("web", 6)
        await control.settled("api", 1)
    for name in control.engine.names():
        control.engine.crash(name, code=137)
    control.router.restart()
    async with control.running():
        await control.settled("web", 6, within_s=10.0)
        await control.settled("api", 1)
        assert len(control.router.ready("web")) == 6


async def test_a_pruned_image_takes_nothing_down_and_is_reported(control: Control) -> None:
    async with control.running(web=2) as controller:
        ready = control.router.ready("web")
        control.engine.images.clear()
        controller.observer.engine.changed()
        await until(lambda: any("is not on this machine" in row.message for row in controller.view.services))
        assert control.router.ready("web") == ready
        control.engine.crash(ready[0])
        await until(lambda: control.row("web")[1] == 1)
        await until(lambda: any("`docker compose build web`" in row.message for row in controller.view.services))
        control.engine.add_image("image/web")
        await control.settled("web", 2, within_s=20.0)


async def test_the_kernels_kills_for_want_of_memory_are_named_in_a_replica_and_within_it(tmp_path: Path) -> None:
    remedy = "raise deploy.resources.limits.memory"
    control = Control.of(tmp_path, service("web", replicas=1), service("api", replicas=1))
    control.engine.behaviours["api"] = Behaviour(exits_after_s=0.0, oom=True)
    async with control.running() as controller:
        await until(lambda: any("out of memory" in row.message for row in controller.view.services))
        assert "out of memory" in control.said("replica_failed")[0]
        assert remedy in control.said("replica_failed")[0]
        await control.settled("web", 1)
        (name,) = control.router.ready("web")
        control.engine.lose_child(name)
        await until(lambda: "out_of_memory" in control.kinds("warning"))
        (event,) = control.events("out_of_memory")
        assert (event.service, event.target) == ("web", name)
        assert remedy in event.message
        assert control.row("web") == (1, 1, 1), "it lives on"


@pytest.mark.parametrize("engine", [FakeEngine, FakeSwarmEngine])
async def test_a_service_in_a_crash_loop_is_tried_ever_more_rarely(tmp_path: Path, engine: type[FakeEngine]) -> None:
    """Also where the engine itself starts again what has ended: the controller is faster."""
    made = engine(wall_clock)
    if isinstance(made, FakeSwarmEngine):
        made.add_node("n1")
    control = Control.of(tmp_path, service("web"), service("bad", replicas=1), engine=made)
    control.engine.behaviours["bad"] = Behaviour(exits_after_s=0.0, exit_code=1, output="loading\nno such model\n")
    async with control.running(web=2) as controller:
        web = {container.id for container in control.engine.containers.values() if container.service == "web"}
        await until(lambda: any(record.count >= 6 for record in control.store.failures.values()), within_s=40.0)
        failed = [event.at for event in control.events("replica_failed")]
        waited = [round(later - earlier) for earlier, later in pairwise(failed)]
        assert waited[-4:] == [1, 2, 4, 8]

        def is_reported() -> bool:
            row = next(row for row in controller.view.services if row.name == "bad")
            waits = any(replica.state == "CRASH_LOOP" for replica in row.replicas)
            said = row.message.startswith("CRASH_LOOP: ") and "next try in" in row.message
            return waits and said and "no such model" in row.message

        await until(is_reported)
        assert web <= set(control.engine.containers)
        assert len(control.router.ready("web")) == 2
