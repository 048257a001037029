"""A service that left the files, and that replicas still call: it stays until the last of them is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from pierhead.discovery.served import Watcher

from controller.daemon.assembly import Controller
from controller.model.spec import RolloutSpec, ServiceSpec
from tests.unit.controller.control import Control, until, version
from tests.unit.controller.worlds import gpu_service, service

pytestmark = pytest.mark.virtual_time

BAKED = RolloutSpec(bake_s=5.0)
MODEL = gpu_service("model", gpu=None, rollout=BAKED)
SCORER = replace(MODEL, name="scorer")
WEB = service(rollout=BAKED)
NEW_WEB = replace(WEB, definition_hash="d2")


@pytest.fixture
def control(tmp_path: Path) -> Control:
    control = Control.of(tmp_path, WEB, MODEL)
    control.engine.add_image(SCORER.image)
    return control


class Callers:
    """The replicas' watches in Discovery: each watches, while it is up, what its version calls."""

    def __init__(self, control: Control, calls: dict[str, list[str]]) -> None:
        self.control = control
        self.calls = calls
        self.unanswered: list[str] = []
        """When a replica that serves had none to call."""

    @contextlib.asynccontextmanager
    async def watching(self, controller: Controller) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch(controller))
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self, controller: Controller) -> None:
        watchers: dict[str, Watcher] = {}
        while True:
            ready = {one.name: one for one in self.control.engine.containers.values() if one.state.is_up}
            for name in watchers.keys() - ready.keys():
                controller.discovery_state.leave(watchers.pop(name))
            for name, one in ready.items():
                called = self.calls.get(one.version) or self.calls.get(one.service, [])
                if called and name not in watchers:
                    watchers[name] = controller.discovery_state.watch(called, name)
                for callee in called if self.control.engine.readiness(name) == "ready" else ():
                    there = controller.discovery_state.state(callee)
                    if not [each for each in there.endpoints if each.state == each.READY] and self._is_settled(callee):
                        self.unanswered.append(f"{name} calls {callee}, of which none is ready")
            await asyncio.sleep(0.05)

    def _is_settled(self, callee: str) -> bool:
        """Whether it has been there: a caller waits for the first replica of a new service."""
        return callee == "model"


async def renamed(control: Control, callers: Callers, *files: ServiceSpec) -> None:
    async with control.running() as controller, callers.watching(controller):
        await control.settled("web", 2)
        await control.settled("model", 2)
        await until(lambda: len(controller.discovery_state.callers()) == 2)
        callers.unanswered.clear()
        control.source.edit(*files)
        await until(lambda: control.row("model") == (-1, -1, -1), within_s=60.0)
        assert {one.service for one in control.engine.containers.values()} == {one.name for one in files}
        assert {one.version for one in control.engine.containers.values() if one.service == "web"} == {
            version(control, files[0])
        }


@pytest.mark.parametrize("files", [(NEW_WEB, SCORER), (NEW_WEB,)], ids=["renamed", "removed"])
async def test_a_callee_that_left_the_files_stays_until_no_running_version_calls_it(
    control: Control, files: tuple[ServiceSpec, ...]
) -> None:
    callers = Callers(control, {version(control, WEB): ["model"], version(control, NEW_WEB): ["scorer"]})
    await renamed(control, callers, *files)
    assert callers.unanswered == []


async def test_it_is_replaced_while_it_stays_and_leaves_its_route(control: Control) -> None:
    routed = replace(MODEL, protocol="http", route="/model")
    control.source.edit(WEB, routed)
    callers = Callers(control, {version(control, WEB): ["model"]})
    async with control.running() as controller, callers.watching(controller):
        await control.settled("model", 2)
        await control.settled("web", 2)
        await until(controller.discovery_state.callers)
        control.source.edit(WEB)
        await until(lambda: control.router.backends == {"svc_web"})
        victim = next(one.name for one in control.engine.containers.values() if one.service == "model")
        control.engine.crash(victim)
        await until(lambda: control.events("replica_failed"))
        await control.settled("model", 2)
        (row,) = [row for row in control.view.services if row.name == "model"]
        assert row.message == "the compose files no longer have it: it stays until web no longer calls it"
        assert row.state == "HEALTHY"


async def test_it_stays_over_a_restart_of_the_controller_whose_callers_come_back_later(control: Control) -> None:
    callers = Callers(control, {version(control, WEB): ["model"]})
    async with control.running() as controller, callers.watching(controller):
        await control.settled("model", 2)
        await control.settled("web", 2)
        await until(controller.discovery_state.callers)
        control.source.edit(WEB)
        await asyncio.sleep(5.0)
    there = {one.id for one in control.engine.containers.values()}
    async with control.running() as controller:
        await asyncio.sleep(5.0)
        async with callers.watching(controller):
            await asyncio.sleep(60.0)
            assert {one.id for one in control.engine.containers.values()} == there
        # Now nobody calls it any more: the end of the watches is the end of the callers.
    async with control.running():
        await until(lambda: control.row("model") == (-1, -1, -1), within_s=30.0)


async def test_of_two_that_leave_and_call_each_other_none_keeps_the_other(control: Control) -> None:
    other = replace(MODEL, name="other", image=MODEL.image)
    control.source.edit(WEB, MODEL, other)
    calls = {version(control, WEB): ["web"], "model": ["other"], "other": ["model"]}
    callers = Callers(control, calls)
    async with control.running() as controller, callers.watching(controller):
        await control.settled("model", 2)
        await control.settled("other", 2)
        await until(lambda: len(controller.discovery_state.callers()) == 6)
        control.source.edit(WEB)
        await until(lambda: {one.service for one in control.engine.containers.values()} == {"web"}, within_s=60.0)


async def test_a_service_that_calls_one_that_does_not_exist_is_not_healthy(control: Control) -> None:
    callers = Callers(control, {version(control, WEB): ["modell"]})
    async with control.running() as controller, callers.watching(controller):
        await control.settled("web", 2)
        await until(lambda: [row.state for row in control.view.services if row.name == "web"] == ["UNHEALTHY"])
