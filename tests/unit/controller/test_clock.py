"""A wall clock that is set must not be taken for time that has passed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controller.desired.revisions import latest_time, state_text
from controller.model.desired import Rollout, RolloutPhase, ServiceRollout
from controller.model.spec import AutoscaleSpec
from controller.model.world import ContainerState
from controller.storage.clock import ContainerTimes, SteadyClock, steady_time
from controller.storage.file import StateFile
from controller.storage.store import StateStore
from tests.fakes.fake_engine import Behaviour
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import replica, service

pytestmark = pytest.mark.virtual_time

HOUR = 3600.0
STEPS = pytest.mark.parametrize("step", [HOUR, -HOUR], ids=["forward", "back"])

seconds = st.floats(min_value=0, max_value=1e9, allow_nan=False)
steps = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


def test_a_clock_that_is_set_moves_nothing() -> None:
    world = {"wall": 1000.0, "monotonic": 50.0}
    clock = SteadyClock(0.0, lambda: world["wall"], lambda: world["monotonic"])
    world |= {"wall": 1000.0 + HOUR, "monotonic": 150.0}
    assert clock() == 1100.0


def test_a_controller_never_begins_before_what_the_state_speaks_of(tmp_path: Path) -> None:
    store = StateStore(StateFile(tmp_path))
    store.failure(("web", "v1"), 5000.0, "exited")
    clock = SteadyClock(store.latest_at, lambda: 2000.0, lambda: 3.0)
    store.close()
    assert clock() == 5000.0


def test_the_phases_of_rollouts_count_as_well() -> None:
    """Else a phase that began before the clock was set back would last for as long as that."""
    baking = Rollout("v1", "v2", RolloutPhase.BAKING, since=6000.0, begun_at=5000.0, cause="another version")
    texts = [
        state_text(ServiceRollout("v1", baking)),
        state_text(ServiceRollout("v1", replace(baking, stuck_since=7000.0))),
        state_text(ServiceRollout("v1", tried_since=6500.0, is_unproven=True)),
        state_text(ServiceRollout("v1")),
        "not a state",
    ]
    assert [latest_time([text]) for text in texts] == [6000.0, 7000.0, 6500.0, 0.0, 0.0]
    assert (latest_time(texts), latest_time([])) == (7000.0, 0.0)


@given(started=seconds, age=seconds, step=steps, was_before=st.booleans())
@example(started=1e-06, age=0.0, step=-1.0, was_before=False)  # the difference lies after now, by rounding
def test_an_age_is_never_overestimated(started: float, age: float, step: float, was_before: bool) -> None:
    """Whether the clock was set before the container started or after: no deadline comes early."""
    now = started + age
    told = started if was_before else started + step
    assert steady_time(told, now, ahead=step) <= now
    assert now - steady_time(told, now, ahead=step) <= age + 1e-3
    assert steady_time(started, now, ahead=0.0) == started


def test_what_was_brought_over_stays_when_the_clock_is_set_later() -> None:
    world = {"now": 2000.0, "wall": 2000.0}
    times = ContainerTimes(lambda: world["now"], lambda: world["wall"])
    one = replica(service(), 1, created_at=1990.0, started_at=1991.0)
    assert times.brought_over([one], 2000.0) == (one,)
    world |= {"now": 2001.0, "wall": 2001.0 + HOUR}
    new = replica(service(), 2, created_at=2000.0 + HOUR, started_at=2000.5 + HOUR)
    old, brought = times.brought_over([one, new], 2001.0)
    assert old == one
    assert (brought.created_at, brought.started_at) == (2000.0, 2000.5)


@pytest.mark.parametrize("behind", [0.0, 120.0, -120.0])
def test_what_the_last_reading_did_not_have_is_no_older_than_it(behind: float) -> None:
    """On a Swarm these are the times of another machine's clock."""
    now = 2000.0
    times = ContainerTimes(lambda: now, lambda: now)
    times.brought_over([], 1990.0)
    now = 2005.0
    new = replica(service(), 1, created_at=2001.0 - behind, started_at=2002.0 - behind)
    (seen,) = times.brought_over([new], 2004.0)
    assert seen.started_at is not None
    assert 1990.0 <= seen.created_at <= seen.started_at <= 2005.0
    now = 2010.0
    moved = replace(new, started_at=2009.0 - behind)
    (again,) = times.brought_over([moved], 2009.5)
    assert again.created_at == seen.created_at
    assert again.started_at is not None
    assert 2004.0 <= again.started_at <= 2010.0
    ended = replace(new, state=ContainerState.EXITED, started_at=2001.5 - behind)  # Swarm's time of an ended task
    (last,) = times.brought_over([ended], 2009.7)
    assert last.created_at == seen.created_at
    assert last.started_at is not None
    assert last.started_at < 2004.0 or behind < 0


@STEPS
async def test_a_step_harms_no_replica_and_events_have_the_new_time(tmp_path: Path, step: float) -> None:
    """Neither those that serve, nor one that is starting, nor one that is created afterwards."""
    control = Control.of(tmp_path, service("web"), service("slow", replicas=1, startup_deadline_s=600.0))
    control.engine.behaviours["slow"] = Behaviour(ready_after_s=1.0)
    async with control.running(web=2) as controller:
        ready = control.router.ready("web")
        control.set_clock(step)
        for _ in range(3):
            await controller.loop.tick()
        assert control.router.ready("web") == ready
        await control.settled("slow", 1)
        controller.commands.scale("slow", 2)
        (scaled,) = control.events("scale")
        assert abs(scaled.at - control.wall()) < 60.0
        await control.settled("slow", 2)
        assert control.kinds("failed") == []
    async with control.running(slow=2):
        assert control.kinds("failed") == []


@STEPS
async def test_a_startup_deadline_is_still_kept_after_the_clock_was_set(tmp_path: Path, step: float) -> None:
    control = Control.of(tmp_path, service("web", replicas=1, startup_deadline_s=0.5))
    control.engine.behaviours["web"] = Behaviour(ready_after_s=1000.0)
    async with control.running():
        await until(control.engine.names)
        control.set_clock(step)
        await until(lambda: "replica_failed" in control.kinds())
        assert any("startup.deadline_s" in record.detail for record in control.store.failures.values())


@STEPS
async def test_a_backoff_is_as_long_as_it_was(tmp_path: Path, step: float) -> None:
    control = Control.of(tmp_path, service("web", replicas=1))
    control.engine.behaviours["web"] = Behaviour(exits_after_s=0.0, exit_code=1)
    async with control.running():
        await until(lambda: any(record.count == 2 for record in control.store.failures.values()))
        control.set_clock(step)
        created = len(control.engine.done)
        await until(lambda: any(record.count == 3 for record in control.store.failures.values()), within_s=3.0)
        assert len(control.engine.done) - created <= 6, "it was tried again and again, without a wait"


@STEPS
async def test_a_drain_ends_at_its_deadline(tmp_path: Path, step: float) -> None:
    control = Control.of(tmp_path, service("web", graceful_shutdown_timeout_s=1.0))
    control.work["web"] = 2
    async with control.running(web=2) as controller:
        began = control.clock()
        controller.commands.scale("web", 1)
        await until(lambda: len(control.store.retirements) == 1)
        control.set_clock(step)
        await control.settled("web", 1)
        assert 0.9 <= control.clock() - began <= 3.0


async def test_the_autoscaler_waits_as_long_as_it_should(tmp_path: Path) -> None:
    rules = AutoscaleSpec(min=1, max=3, target_ongoing_requests=1.0, look_back_period_s=1.0, upscale_delay_s=600.0)
    control = Control.of(tmp_path, service("web", replicas=1, autoscale=replace(rules, panic_threshold=100.0)))
    async with control.running(web=1) as controller:
        control.work["web"] = 3
        control.set_clock(HOUR)
        for _ in range(5):
            await controller.loop.tick()
        assert control.row("web")[0] == 1
