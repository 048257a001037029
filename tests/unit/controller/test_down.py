"""A controller that gets SIGTERM: a restart leaves the replicas, the end of the stack removes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controller.daemon.down import is_going_down, remove_replicas
from controller.errors import EngineSocketGone, EngineUnreachable
from controller.model.observed import EngineState
from controller.model.world import ReplicaContainer
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.harness.virtual_time import wall_clock
from tests.unit.controller.control import PROJECT, Control
from tests.unit.controller.worlds import service

pytestmark = pytest.mark.virtual_time


async def started(tmp_path: Path, behaviour: Behaviour) -> FakeEngine:
    control = Control.of(tmp_path, service("web", replicas=3))
    control.engine.behaviours["web"] = behaviour
    async with control.running():
        await control.settled("web", 3)
    return control.engine


async def test_a_stop_is_a_restart_while_prometheus_is_there() -> None:
    engine = FakeEngine(wall_clock)
    assert await is_going_down(engine, PROJECT)
    engine.add_container("prometheus", project=PROJECT, service="prometheus")
    assert not await is_going_down(engine, PROJECT)


async def test_a_stack_without_prometheus_goes_down_when_its_haproxy_does() -> None:
    """An operator who removed Prometheus and restarts the controller must not lose every replica."""
    engine = FakeEngine(wall_clock)
    haproxy = engine.add_container("haproxy", project=PROJECT, service="haproxy")
    assert not await is_going_down(engine, PROJECT, haproxy_gone_s=0.3)
    asked = asyncio.create_task(is_going_down(engine, PROJECT, haproxy_gone_s=10.0))
    await asyncio.sleep(0)
    engine.delete(haproxy.name)
    assert await asked
    engine.go_away()
    assert not await is_going_down(engine, PROJECT), "an engine that does not answer: replicas stay"


async def test_replicas_end_by_themselves_and_are_removed(tmp_path: Path) -> None:
    engine = await started(tmp_path, Behaviour(drain_s=0.3))
    foreign = engine.add_container("somebody", project="other", service="web")
    before = wall_clock()
    await remove_replicas(engine, PROJECT)
    assert 0.3 <= wall_clock() - before < 5, "removed once they have ended"
    assert list(engine.containers) == [foreign.id]


async def test_those_that_do_not_end_are_ended(tmp_path: Path) -> None:
    engine = await started(tmp_path, Behaviour(ignores_sigterm=True))
    await remove_replicas(engine, PROJECT, limit_s=10.5)
    assert engine.containers == {}


async def test_a_creation_that_comes_late_is_removed_too(tmp_path: Path) -> None:
    engine = await started(tmp_path, Behaviour())
    late = (await engine.observe(PROJECT, (), ())).containers[0]
    looks: list[tuple[ReplicaContainer, ...]] = [(), (), (), (late,), (), ()]

    class Late(FakeEngine):
        async def observe(self, *arguments: object) -> EngineState:
            return EngineState(looks.pop(0), (), {}, (), {})

    other = Late(wall_clock)
    await remove_replicas(other, PROJECT)
    assert [action.target for action in other.done] == [late.name]
    assert looks == []


async def test_an_engine_that_is_slow_to_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await started(tmp_path, Behaviour())
    answer, refusals = FakeEngine.observe, [EngineUnreachable("too slow"), EngineUnreachable("too slow")]

    async def observe(*arguments: Any) -> EngineState:
        if refusals:
            raise refusals.pop()
        return await answer(*arguments)

    monkeypatch.setattr(FakeEngine, "observe", observe)
    await remove_replicas(engine, PROJECT)
    assert (engine.containers, refusals) == ({}, [])


async def test_an_engine_that_stays_away_ends_the_removal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = await started(tmp_path, Behaviour(ignores_sigterm=True))
    engine.go_away()
    await remove_replicas(engine, PROJECT, limit_s=0.5)
    assert "replicas were left behind" in caplog.text
    engine.go_away(EngineSocketGone)
    with pytest.raises(EngineSocketGone):
        await remove_replicas(engine, PROJECT)
