"""The whole controller on fakes: states of the world after things happened to it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import pytest

from controller.errors import EngineError, EngineLeaderless, EngineSocketGone, EngineUnreachable, SpecError
from controller.model.actions import CreateContainer
from controller.model.machine import Machine
from controller.model.observed import NOT_LOOKED_YET
from controller.model.plan import Plan
from controller.model.spec import ProbeSpec
from controller.model.world import Gpu
from controller.observe.judge import ProbeReading
from controller.observe.prober import Subject
from controller.observe.watch import Watch
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import gpu_service, service

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("web"), service("api", replicas=1))


@pytest.mark.parametrize(
    ("output", "gist"),
    [
        ("loading\nboom\n", "boom"),
        ('{"message": "cannot read caf\\udce9.txt"}\n', "cannot read caf\\udce9.txt"),
        ('{"message": "one\\ntwo\\u001b[31m"}\n', "one two [31m"),
        ("[" * 60_000, "[" * 200 + "..."),
    ],
    ids=["text", "half a character", "control characters", "long and no JSON"],
)
async def test_a_failed_replica_is_replaced_and_the_events_have_its_cause_and_its_last_line(
    control: Control, output: str, gist: str
) -> None:
    control.engine.behaviours["web"] = Behaviour(output=output)
    async with control.running(web=2):
        victim = control.router.ready("web")[0]
        control.engine.crash(victim, code=3)
        await until(lambda: control.store.failures)
        await control.settled("web", 2)
        (failed,) = control.events("replica_failed")
        assert (failed.target, "code 3" in failed.message) == (victim, True)
        assert [record.detail.endswith(f": {gist}") for record in control.store.failures.values()] == [True]
    async with control.running():
        await control.settled("web", 2)


@pytest.mark.parametrize(
    ("hangs", "words"),
    [
        (False, "its log cannot be read: logs failed: configured logging driver does not support reading"),
        (True, "its log cannot be read: the engine gave nothing of it within 0.05 s"),
    ],
    ids=["no log", "the engine hangs"],
)
async def test_a_failed_replica_whose_log_cannot_be_read_is_replaced_all_the_same(
    control: Control, monkeypatch: pytest.MonkeyPatch, hangs: bool, words: str
) -> None:
    async def logs(*arguments: object, **options: object) -> str:
        if hangs:
            await asyncio.Event().wait()
        raise EngineError("logs failed: configured logging driver does not support reading")

    monkeypatch.setattr(FakeEngine, "logs", logs)
    monkeypatch.setattr("controller.daemon.apply.LOG_LIMIT_S", 0.05)
    async with control.running(web=2):
        control.engine.crash(control.router.ready("web")[0], code=3)
        await until(lambda: "replica_failed" in control.kinds())
        await control.settled("web", 2)
        (failed,) = control.events("replica_failed")
        assert words in failed.message
        assert [words in record.detail for record in control.store.failures.values()] == [True]
        assert "remove_container" not in control.kinds("failed")


async def test_a_new_controller_adopts_everything_and_restarts_nothing(control: Control) -> None:
    async with control.running():
        await control.settled("web", 2)
        await control.settled("api", 1)
    assert "adopted" not in control.kinds(), "nothing was there"
    containers, done = set(control.engine.containers), len(control.engine.done) + len(control.router.done)
    async with control.running() as controller:
        await until(lambda: "adopted" in control.kinds())
        await control.settled("web", 2)
        # The very first view that it published already knew that they are ready.
        assert [stored.event.kind for stored in controller.events.select(limit=1000)].count("replica_ready") == 3
        await controller.loop.tick()
    assert set(control.engine.containers) == containers
    assert len(control.engine.done) + len(control.router.done) == done


async def test_nothing_is_planned_before_a_first_reading(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control.running():
        await control.settled("web", 2)
        await control.settled("api", 1)
    done = len(control.engine.done)

    async def returns_without_a_reading(*arguments: object, **options: object) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(Watch, "answer", returns_without_a_reading)
    control.engine.reading_s = 3600.0
    async with control.running() as loop:
        await until(lambda: loop.view.observed is not NOT_LOOKED_YET)
        assert loop.view.plan == Plan()
        assert control.engine.done[done:] == []
        assert not loop.view.engine_reachable
        assert loop.discovery_state.state("web").unknown, "callers keep what they know"
        assert any("the containers were not read yet" in notice for notice in loop.view.notices)


async def test_what_scale_has_set_to_zero_is_refused_at_once_until_it_is_scaled_up(control: Control) -> None:
    """At HAProxy and by callers; also after a restart of HAProxy, and of the controller."""
    async with control.running(web=2) as controller:
        assert controller.discovery_state.state("web").scaled_to_zero_by == ""
        controller.commands.scale("web", 0)
        await control.settled("web", 0)
        await until(lambda: control.router.closed == {"svc_web"})
        await until(lambda: controller.discovery_state.state("web").scaled_to_zero_by == "`pierhead scale`")
        control.router.restart()
        await until(lambda: control.router.closed == {"svc_web"})
    done = len(control.router.done)
    async with control.running() as controller:
        await until(lambda: controller.discovery_state.state("web").scaled_to_zero_by == "`pierhead scale`")
        await control.settled("web", 0)
        assert (control.router.closed, len(control.router.done)) == ({"svc_web"}, done), "nothing to do for HAProxy"
        controller.commands.scale("web", 1)
        await until(lambda: not control.router.closed and not controller.discovery_state.state("web").scaled_to_zero_by)
        await control.settled("web", 1)


async def test_a_scale_target_can_be_taken_back(control: Control) -> None:
    """The engine takes 2 s for a start, so 60 replicas would take 15 s; only what was begun comes, and goes at once."""
    async with control.running(web=2) as controller:
        control.engine.starting_s = 2.0
        controller.commands.scale("web", 60)
        await asyncio.sleep(3.0)
        done = len(control.engine.done)
        controller.commands.scale("web", 1)
        await control.settled("web", 1, within_s=6.0)
    assert [one for one in control.engine.done[done:] if isinstance(one, CreateContainer)] == []


async def test_a_scale_target_beyond_the_machine_ends_with_what_fits_and_can_be_taken_back(control: Control) -> None:
    gib = 1024**3
    control.engine.machine = Machine(2, 4 * gib, 3 * gib, most_processes=32768, processes=500, load=1.0)
    control.engine.behaviours["web"] = Behaviour(ready_after_s=1.0)
    async with control.running(web=2) as controller:
        controller.commands.scale("web", 1000)
        await until(lambda: len(control.view.plan.pending) == 1000 - 27 and control.row("web")[1] == 27, within_s=60.0)
        await asyncio.sleep(60.0)
        assert control.row("web") == (1000, 27, 1000)
        (reason,) = {one.reason for one in control.view.plan.pending}
        assert reason.startswith("one replica takes 100 MiB and 272 MiB of 4 GiB of memory are free on this machine, ")
        assert len(control.events()) < 200
        controller.commands.scale("web", 2)
        await control.settled("web", 2, within_s=5.0)


async def test_a_scale_target_outlives_the_controller_until_its_number_in_the_files_changes(control: Control) -> None:
    async with control.running(web=2) as controller:
        controller.commands.scale("web", 3)
        await control.settled("web", 3)
    async with control.running(web=3):
        control.source.edit(service("web", replicas=1), service("api", replicas=1))
        await control.settled("web", 1)
        assert control.store.overrides == {}


async def test_a_scale_target_ends_with_its_service_and_not_with_files_that_cannot_be_read(control: Control) -> None:
    async with control.running(web=2) as controller:
        controller.commands.scale("web", 3)
        await control.settled("web", 3)
        control.source.edit(error=SpecError(["services: not valid YAML"]))
        await until(lambda: controller.view.spec_problems)
        assert set(control.store.overrides) == {"web"}
        control.source.edit(service("api", replicas=1))
        await until(lambda: not control.store.overrides)
        assert "web: the compose files no longer have web; the number set by scale, 3, no longer applies" in [
            event.message for event in control.events()
        ]
        control.source.edit(service("web"), service("api", replicas=1))
        await control.settled("web", 2, within_s=15)


async def test_a_haproxy_that_restarts_or_is_away_is_reported_and_gets_its_servers_back(control: Control) -> None:
    async with control.running(web=2) as controller:
        control.router.restart()
        await until(lambda: len(control.router.ready("web")) == 2, within_s=2.0)
        await until(lambda: "haproxy_restarted" in control.kinds())
        control.router.up = False
        await until(lambda: controller.view.haproxy_reachable is False)
        assert any("HAProxy" in notice for notice in controller.view.notices)
        control.router.up = True
        await until(lambda: controller.view.haproxy_reachable)
        assert {"haproxy_silent", "haproxy_answers"} <= set(control.kinds())


@pytest.mark.parametrize(
    ("for_good", "words"),
    [(False, "has not answered for 0.5 s"), (True, "its socket file is deleted")],
    ids=["no answer", "its socket is deleted"],
)
async def test_a_controller_whose_engine_stays_away_ends_and_leaves_everything_as_it_is(
    control: Control, monkeypatch: pytest.MonkeyPatch, for_good: bool, words: str
) -> None:
    control.engine_lost_s = 3600.0 if for_good else 0.5
    monkeypatch.setattr("controller.observe.engine_events.SOCKET_GONE_S", 0.5)
    with pytest.RaisesGroup(pytest.RaisesExc(EngineUnreachable, match=words)):
        async with control.running(web=2):
            done = len(control.engine.done)
            control.engine.go_away(EngineSocketGone if for_good else EngineUnreachable)
            await until(lambda: False, within_s=10.0)
    assert (len(control.engine.done), len(control.router.ready("web"))) == (done, 2)


async def test_while_a_swarm_has_no_leader_nothing_is_planned_and_the_controller_stays(control: Control) -> None:
    control.engine_lost_s = 0.5
    async with control.running(web=2) as controller:
        done = len(control.engine.done)
        control.engine.go_away(EngineLeaderless)
        await until(lambda: controller.view.engine_reachable is False, within_s=15.0)
        control.source.edit(service("web", replicas=3), service("api", replicas=1))
        later = asyncio.get_running_loop().time() + 5
        await until(lambda: asyncio.get_running_loop().time() > later, within_s=15.0)
        assert (len(control.engine.done), controller.view.plan.steps) == (done, ())
        control.engine.come_back()
        await control.settled("web", 3)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (SpecError(["services.web.x-serve.rout: unknown key"]), "services.web.x-serve.rout: unknown key"),
        (KeyError("services"), "internal: reading the compose files raised KeyError: 'services'"),
    ],
    ids=["wrong files", "a defect in the reader"],
)
async def test_files_that_cannot_be_read_change_nothing(control: Control, error: Exception, problem: str) -> None:
    async with control.running(web=2) as controller:
        containers = set(control.engine.containers)
        control.source.edit(error=error)
        await until(lambda: controller.view.spec_problems)
        assert controller.view.spec_problems == (problem,)
        assert set(control.engine.containers) == containers
        control.source.edit(service("web", replicas=1))
        await control.settled("web", 1)


async def test_files_are_read_although_looking_for_changes_fails(control: Control) -> None:
    async def broken() -> Hashable:
        raise KeyError("maybe")

    async with control.running(web=2) as controller:
        control.source.error = SpecError(["services.web.x: expected true or false"])
        control.source.fingerprint = broken  # type: ignore[method-assign]
        await until(lambda: controller.view.spec_problems == ("services.web.x: expected true or false",))


async def test_a_spec_error_at_the_start_waits_for_the_files(control: Control) -> None:
    control.source.error = SpecError(["services.web.image: expected a name, found nothing"])
    async with control.running() as controller:
        await until(lambda: controller.view.spec_problems)
        assert controller.view.desired is None
        with pytest.raises(SpecError):
            controller.commands.scale("web", 1)
        control.source.edit(service("web"))
        await control.settled("web", 2)


async def test_replicas_that_only_the_controller_cannot_reach_are_left_alone(control: Control) -> None:
    control.source.services["web"] = replace(
        control.source.services["web"], probe=replace(service().probe, period_s=0.05, failures=2)
    )
    async with control.running(web=2) as controller:
        replicas = set(control.engine.containers)
        control.silent.update(control.router.ready("web"))
        await until(
            lambda: any(
                "HAProxy's own check passes" in container.health_detail
                for container in controller.view.observed.containers
            )
        )
        assert set(control.engine.containers) == replicas
        assert len(controller.view.endpoints["web"].endpoints) == 2, "callers keep them too"


GIB = 1024**3


async def test_a_replica_waits_for_memory_that_others_use_and_starts_when_it_is_free(tmp_path: Path) -> None:
    control = Control.of(tmp_path, gpu_service("ranker", replicas=1))
    control.engine.gpus = (Gpu("GPU-0", memory_bytes=80 * GIB),)
    control.engine.gpu_memory = {"GPU-0": 60 * GIB}
    async with control.running() as controller:
        wanted = "it asks for 1 GPU and 0 of 1 are free: 1 with 60 GiB in use by other processes"
        await until(lambda: [pending.reason for pending in controller.view.plan.pending] == [wanted])
        assert control.engine.names() == []
        assert controller.view.gpus[0].used_bytes == 60 * GIB
        control.engine.gpu_memory = {"GPU-0": GIB // 2}
        control.engine.add_container("somebody", gpus=("GPU-0",))
        await until(lambda: "held by container somebody" in controller.view.plan.pending[0].reason)
        control.engine.delete("somebody")  # what was read before its end is not believed: it is read at once
        await control.settled("ranker", 1)
        assert controller.view.gpus[0].used_bytes == GIB // 2


async def test_a_defect_in_the_planner_is_an_event_and_ends_nothing(control: Control) -> None:
    async with control.running(web=2) as controller:
        planner, controller.loop.planner = controller.loop.planner, lambda *_: 1 / 0  # type: ignore[assignment]
        await until(lambda: "tick_failed" in control.kinds("failed"))
        told = "internal: a tick raised ZeroDivisionError: division by zero; nothing is done until this is over"
        ended_at = controller.publisher.last_tick_at
        control.engine.crash(control.router.ready("web")[0])
        await until(lambda: controller.events.select(limit=1)[0].times >= 2)
        assert (controller.view.notices, controller.publisher.defect) == ((told,), told)
        assert controller.publisher.last_tick_at == ended_at, "a tick that fails is no sign of life"
        controller.loop.planner = planner
        controller.commands.scale("web", 3)
        await control.settled("web", 3)
        assert (controller.view.notices, controller.publisher.defect) == ((), "")


async def test_a_defect_in_asking_one_replica_ends_nothing(control: Control, caplog: pytest.LogCaptureFixture) -> None:
    ask = control.ask

    async def asked(subject: Subject) -> ProbeReading:
        if subject.spec.port == 9101:
            raise KeyError("state")
        return await ask(subject)

    control.ask = asked  # type: ignore[method-assign]
    control.source.services["api"] = service("api", replicas=1, probe=ProbeSpec(9101, "/readyz"))
    async with control.running(web=2):
        await until(lambda: "asking a replica raised" in caplog.text)
        control.ask = ask  # type: ignore[method-assign]
        control.engine.crash(control.router.ready("web")[0])
        await until(lambda: "replica_failed" in control.kinds())
        await control.settled("web", 2)
