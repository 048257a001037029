"""Replicas whose probes pass although they make no progress, and replicas that start slowly and do make some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controller.model.actions import SignalContainer
from controller.model.phases import Phase, phase_of
from controller.model.spec import ProbeSpec
from controller.model.world import ReplicaHealth
from controller.plan import plan
from tests.fakes.fake_engine import Behaviour
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import NOW, desired, observed, replica, retirement, service

pytestmark = pytest.mark.virtual_time

PROBE = ProbeSpec(port=9100, path="/readyz", progress_timeout_s=30.0)


def test_a_replica_that_hangs_longer_than_it_may_has_failed() -> None:
    spec = service(probe=PROBE)
    hanging = replica(spec, 1, ongoing=3, stalled_since=NOW - 30.0)
    assert phase_of(hanging, spec, None, NOW) == (
        Phase.FAILED,
        "it hangs: 3 requests in flight, and none was answered or sent a message for 30 s (health.progress_timeout_s)",
    )
    for stalled_since in (NOW - 29.0, None):
        assert phase_of(replace(hanging, stalled_since=stalled_since), spec, None, NOW)[0] is Phase.RUNNING
    assert phase_of(hanging, service(), None, NOW)[0] is Phase.RUNNING, "without a limit"


def test_what_hangs_is_not_waited_for() -> None:
    spec = service(probe=PROBE, replicas=1)
    hanging = replica(spec, 1, ongoing=3, stalled_since=NOW - 31.0)
    world = observed(hanging, specs=(spec,), retirements=retirement(hanging, failed=True, draining_since=NOW))
    actions = [step.action for step in plan(desired(spec), world, NOW).steps]
    signals = [action for action in actions if isinstance(action, SignalContainer)]
    assert [(signal.signal, signal.cause.endswith("it makes no progress")) for signal in signals] == [("SIGTERM", True)]


def test_progress_extends_the_deadline_of_a_start() -> None:
    spec, loading = service(startup_deadline_s=60.0), "503 from :9100/readyz: loading, 37 %"
    slow = replica(spec, 1, health=ReplicaHealth.UNKNOWN, started_at=NOW - 600.0, health_detail=loading)
    assert phase_of(slow, spec, None, NOW)[0] is Phase.FAILED
    assert phase_of(replace(slow, progressed_at=NOW - 59.0), spec, None, NOW)[0] is Phase.STARTING
    assert phase_of(replace(slow, progressed_at=NOW - 61.0), spec, None, NOW) == (
        Phase.FAILED,
        f"not ready 600 s after its start and 60 s after its last progress (startup.deadline_s): {loading}",
    )
    unheard = replace(slow, node="n3", health_detail="no answer from :9100/readyz within 2 s")
    assert "(if no replica on n3 answers: open 4789/udp," in phase_of(unheard, spec, None, NOW)[1]


async def test_a_replica_that_hangs_is_replaced_and_others_are_left_alone(tmp_path: Path) -> None:
    spec = service("web", probe=replace(PROBE, progress_timeout_s=0.5, period_s=0.1))
    control = Control.of(tmp_path, spec, service("api", replicas=1))
    async with control.running(web=2, api=1):
        api = control.router.ready("api")
        victim = control.router.ready("web")[0]
        container = control.engine.by_name(victim).id
        control.stuck.add(victim)
        await until(lambda: container not in control.engine.containers)
        control.stuck.clear()
        await control.settled("web", 2)
        assert control.router.ready("api") == api
        assert "it hangs: 2 requests in flight" in " ".join(control.said("replica_failed"))


async def test_a_start_that_gets_on_outlives_its_deadline_and_one_that_stops_does_not(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web", replicas=1, startup_deadline_s=0.6))
    control.engine.behaviours["web"] = Behaviour(ready_after_s=1000.0)
    async with control.running():
        await until(control.engine.names)
        (first,) = control.engine.containers
        name = control.engine.containers[first].name
        began = control.clock()
        while control.clock() - began < 2.0:
            step = int((control.clock() - began) * 10)
            control.starts["web"] = (step, f"loading weights, {step} %")
            await until(lambda: int((control.clock() - began) * 10) > control.starts["web"][0])
        assert first in control.engine.containers, "it was three times over its deadline, and got on all the time"
        control.starts["web"] = (100, "compiling")
        await until(lambda: first not in control.engine.containers)
        steps = [event.message for event in control.events("replica_progress") if event.target == name]
        assert len(steps) <= 2, "a stage is reported once, not each of its steps"
        assert steps[-1].endswith(": compiling")
        assert any("after its last progress (startup.deadline_s)" in event.message for event in control.events())
