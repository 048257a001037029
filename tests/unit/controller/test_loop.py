"""The whole controller on fakes: states of the world after things happened to it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import pytest

from controller import apply as perform
from controller.assembly import Controller
from controller.errors import EngineError, EngineUnreachable, ImageNotFound, RoutingError, SpecError, UnknownService
from controller.loop import Wakeup
from controller.model.actions import AddServer, CreateContainer, StartContainer
from controller.model.plan import Outcome, Plan
from controller.model.spec import ProbeSpec
from controller.model.world import Gpu
from controller.observe.probe import Reading, Subject
from controller.observe.watch import Watch
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import gpu_service, gpus, service

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("web"), service("api", replicas=1))


async def test_starts_what_is_wanted_and_sends_it_traffic(control: Control) -> None:
    async with control.running():
        await control.settled("web", 2)
        await control.settled("api", 1)
        assert len(control.router.ready("web")) == 2
        assert len(control.view.endpoints["web"].replicas) == 2
        assert "nothing to do" in str(control.view.plan)
        assert control.kinds("failed") == []


async def test_scales_up_down_and_to_nothing(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        for count in (5, 1, 0, 3):
            controller.commands.scale("web", count)
            await control.settled("web", count)
            assert len(control.router.ready("web")) == count
        assert len(control.engine.names()) == 4
        assert control.store.retirements == {}


async def test_a_killed_replica_is_replaced_and_the_cause_told(control: Control) -> None:
    control.engine.behaviours["web"] = Behaviour(output="loading\nboom\n")
    async with control.running() as controller:
        await control.settled("web", 2)
        victim = control.router.ready("web")[0]
        control.engine.crash(victim, code=3)
        await until(lambda: control.row("web")[1] == 1)
        await control.settled("web", 2)
        failed = [
            stored.event for stored in controller.events.select(limit=1000) if stored.event.kind == "replica_failed"
        ]
        assert [event.target for event in failed] == [victim]
        assert "code 3" in failed[0].message
        assert failed[0].message.endswith("boom")
        assert ["boom" in record.detail for record in control.store.failures.values()] == [True]


@pytest.mark.parametrize(
    ("output", "gist"),
    [
        ('{"message": "cannot read caf\\udce9.txt"}\n', "cannot read caf\\udce9.txt"),
        ('{"message": "one\\ntwo\\u001b[31m"}\n', "one two [31m"),
        ("[" * 60_000, "[" * 200 + "..."),
    ],
)
async def test_a_replica_s_last_words_may_be_anything(control: Control, output: str, gist: str) -> None:
    control.engine.behaviours["web"] = Behaviour(output=output)
    async with control.running():
        await control.settled("web", 2)
        control.engine.crash(control.router.ready("web")[0])
        await until(lambda: control.store.failures)
        assert [record.detail.endswith(f": {gist}") for record in control.store.failures.values()] == [True]
        await control.settled("web", 2)
    async with control.running():
        await control.settled("web", 2)


async def test_a_failed_replica_whose_log_cannot_be_read_is_replaced_all_the_same(control: Control) -> None:
    control.engine.behaviours["web"] = Behaviour(logging_driver="none")
    async with control.running() as controller:
        await control.settled("web", 2)
        victim = control.router.ready("web")[0]
        control.engine.crash(victim, code=3)
        await until(lambda: "replica_failed" in control.kinds())
        await control.settled("web", 2)
        (failed,) = [
            one.event.message for one in controller.events.select(limit=1000) if one.event.kind == "replica_failed"
        ]
        words = "its log cannot be read: logs failed: the Docker Engine says: configured logging driver does not"
        assert words in failed
        assert [words in record.detail for record in control.store.failures.values()] == [True]
        assert "remove_container" not in control.kinds("failed")


async def test_a_failed_replica_s_log_is_not_waited_for_for_long(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def logs(engine: FakeEngine, container_id: str, tail: int, after: float | None = None) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(FakeEngine, "logs", logs)
    monkeypatch.setattr(perform, "LOG_LIMIT_S", 0.05)
    async with control.running():
        await control.settled("web", 2)
        control.engine.crash(control.router.ready("web")[0], code=3)
        await until(lambda: "replica_failed" in control.kinds())
        await control.settled("web", 2)
        (record,) = control.store.failures.values()
        assert record.detail.endswith("its log cannot be read: the engine gave nothing of it within 0.05 s")


async def test_a_crash_loop_is_slowed_and_named(control: Control) -> None:
    control.engine.behaviours["api"] = Behaviour(exits_after_s=0.0, exit_code=1, output="no such file\n")
    async with control.running() as controller:
        await until(lambda: any(record.count >= 3 for record in control.store.failures.values()))
        row = next(row for row in controller.view.services if row.name == "api")
        await until(lambda: "CRASH_LOOP" in next(r for r in controller.view.services if r.name == "api").message)
        assert row.ready == 0
        await control.settled("web", 2)


async def test_a_new_controller_adopts_everything_and_restarts_nothing(control: Control) -> None:
    async with control.running():
        await control.settled("web", 2)
        await control.settled("api", 1)
    containers, done = set(control.engine.containers), len(control.engine.done) + len(control.router.done)
    async with control.running() as controller:
        await until(lambda: "adopted" in control.kinds())
        await control.settled("web", 2)
        # The very first view that it published already knew that they are ready.
        assert [stored.event.kind for stored in controller.events.select(limit=1000)].count("replica_ready") == 3
        await controller.loop.tick()
    assert set(control.engine.containers) == containers
    assert len(control.engine.done) + len(control.router.done) == done


async def test_nothing_is_planned_before_the_containers_were_read(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control.running():
        await control.settled("web", 2)
        await control.settled("api", 1)
    done = len(control.engine.done)

    async def returns_without_a_reading(*arguments: object, **options: object) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(Watch, "answer", returns_without_a_reading)
    control.engine.reading_s = 3600.0
    async with control.running() as loop:
        await until(lambda: loop.view.observed is not None)
        assert loop.view.plan == Plan()
        assert control.engine.done[done:] == []
        assert not loop.view.engine_reachable
        assert loop.board.state("web").unknown, "callers keep what they know"
        assert any("the containers were not read yet" in notice for notice in loop.view.notices)


async def test_nobody_waits_at_haproxy_for_a_service_that_was_scaled_to_zero(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        controller.commands.scale("web", 0)
        await control.settled("web", 0)
        await until(lambda: control.router.closed == {"svc_web"})
        control.router.restart()  # which knows of nothing
        await until(lambda: control.router.closed == {"svc_web"})
    done = len(control.router.done)
    async with control.running() as controller:
        await until(lambda: "adopted" in control.kinds() or controller.view.observed is not None)
        await control.settled("web", 0)
        assert control.router.closed == {"svc_web"}
        assert len(control.router.done) == done, "a new controller finds it as it was"
        controller.commands.scale("web", 1)
        await until(lambda: not control.router.closed)
        await control.settled("web", 1)


async def test_callers_hear_that_a_service_was_scaled_to_zero_and_that_it_is_back(control: Control) -> None:
    def told(controller: Controller) -> str:
        return controller.board.state("web").scaled_to_zero_by

    async with control.running() as controller:
        await control.settled("web", 2)
        assert told(controller) == ""
        controller.commands.scale("web", 0)
        await until(lambda: told(controller) == "`make scale`")
    async with control.running() as controller:
        await until(lambda: told(controller) == "`make scale`")
        controller.commands.scale("web", 1)
        await until(lambda: told(controller) == "")


async def test_a_new_controller_goes_on_with_a_retirement(control: Control) -> None:
    control.engine.behaviours["web"] = Behaviour(drain_s=0.3)
    async with control.running() as controller:
        await control.settled("web", 2)
        controller.commands.scale("web", 1)
        await until(lambda: len(control.store.retirements) == 1)
    async with control.running():
        await control.settled("web", 1)


async def test_scale_targets_outlive_the_controller_until_the_files_change(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        controller.commands.scale("web", 3)
        await control.settled("web", 3)
    async with control.running():
        await control.settled("web", 3)
        control.source.edit(service("web", replicas=1), service("api", replicas=1))
        await control.settled("web", 1)
        assert control.store.overrides == {}


async def test_a_scale_target_ends_with_its_service(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        controller.commands.scale("web", 3)
        await control.settled("web", 3)
        control.source.edit(error=SpecError(["services: not valid YAML"]))
        await until(lambda: controller.view.spec_problems)
        assert set(control.store.overrides) == {"web"}
        control.source.edit(service("api", replicas=1))
        await until(lambda: not control.store.overrides)
        told = "web: the compose files no longer have web; the 3 set by scale end"
        assert told in [stored.event.message for stored in controller.events.select(limit=1000)]
        control.source.edit(service("web"), service("api", replicas=1))
        await control.settled("web", 2, within_s=15)


async def test_a_restarted_haproxy_gets_its_servers_back(control: Control) -> None:
    async with control.running():
        await control.settled("web", 2)
        control.router.restart()
        await until(lambda: len(control.router.ready("web")) == 2, within_s=2.0)
        await until(lambda: "haproxy_restarted" in control.kinds())


async def test_haproxy_away_is_told_and_survived(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        control.router.up = False
        await until(lambda: controller.view.haproxy_reachable is False)
        assert any("HAProxy" in notice for notice in controller.view.notices)
        control.router.up = True
        await until(lambda: controller.view.haproxy_reachable)
        assert {"haproxy_silent", "haproxy_answers"} <= set(control.kinds())


async def test_nothing_is_done_while_the_engine_is_away(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        done = len(control.engine.done)
        control.engine.go_away()
        await until(lambda: controller.view.engine_reachable is False)
        controller.commands.scale("web", 4)
        await until(lambda: any(row.wanted == 4 for row in controller.view.services))
        assert len(control.engine.done) == done
        assert len(controller.view.endpoints["web"].replicas) == 2
        control.engine.come_back()
        await control.settled("web", 4)


async def test_a_controller_whose_engine_stays_away_ends_and_touches_nothing(control: Control) -> None:
    control.engine_lost_s = 0.5
    with pytest.RaisesGroup(EngineUnreachable):
        async with control.running():
            await control.settled("web", 2)
            done = len(control.engine.done)
            control.engine.go_away()
            await until(lambda: False, within_s=10.0)
    assert len(control.engine.done) == done


async def test_a_controller_whose_engine_will_have_another_socket_ends_sooner(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.observe.engine_events.SOCKET_GONE_S", 0.5)
    with pytest.RaisesGroup(pytest.RaisesExc(EngineUnreachable, match="its socket file is deleted")):
        async with control.running() as controller:
            await control.settled("web", 2)
            control.engine.go_away(with_its_socket=True)
            await until(lambda: controller.view.engine_reachable is False)
            await until(lambda: False, within_s=10.0)
    assert len(control.router.ready("web")) == 2


async def test_a_spec_error_at_run_time_touches_nothing(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        containers = set(control.engine.containers)
        control.source.edit(error=SpecError(["services.web.x-serve.rout: unknown key"]))
        await until(lambda: controller.view.spec_problems)
        assert controller.view.spec_problems == ("services.web.x-serve.rout: unknown key",)
        assert set(control.engine.containers) == containers
        control.source.edit(service("web"), service("api", replicas=1))
        await until(lambda: not controller.view.spec_problems)
        assert set(control.engine.containers) == containers


async def test_a_spec_error_at_the_start_waits_for_the_files(control: Control) -> None:
    control.source.error = SpecError(["services.web.image: expected a name, found nothing"])
    async with control.running() as controller:
        await until(lambda: controller.view.spec_problems)
        assert controller.view.desired is None
        with pytest.raises(SpecError):
            controller.commands.scale("web", 1)
        control.source.edit(service("web"))
        await control.settled("web", 2)


async def test_a_removed_service_is_drained_and_gone(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        await control.settled("api", 1)
        control.source.edit(service("api", replicas=1))
        await until(lambda: len(control.engine.containers) == 1)
        assert not [name for name in control.engine.names() if "-web-" in name]
        await until(lambda: [row.name for row in controller.view.services] == ["api"])


async def test_a_new_build_replaces_one_by_one(control: Control) -> None:
    async with control.running():
        await control.settled("web", 2)
        before = set(control.router.ready("web"))
        control.engine.add_image("image/web", "2")
        await until(lambda: not before & set(control.router.ready("web")), within_s=10)
        await control.settled("web", 2)


async def test_a_hanging_replica_is_replaced(control: Control) -> None:
    control.source.services["web"] = replace(
        control.source.services["web"], probe=replace(service().probe, period_s=0.05, failures=2)
    )
    async with control.running():
        await control.settled("web", 2)
        victim = control.router.ready("web")[0]
        control.engine.hang(victim)
        control.router.mark_down(victim)
        hung = control.engine.by_name(victim).id
        await until(lambda: hung not in control.engine.containers, within_s=10)
        await control.settled("web", 2)


async def test_replicas_that_only_the_controller_cannot_reach_are_left_alone(control: Control) -> None:
    control.source.services["web"] = replace(
        control.source.services["web"], probe=replace(service().probe, period_s=0.05, failures=2)
    )
    async with control.running() as controller:
        await control.settled("web", 2)
        replicas = set(control.engine.containers)
        control.silent.update(control.router.ready("web"))
        await until(
            lambda: any(
                "HAProxy's own check passes" in container.health_detail
                for container in (controller.view.observed.containers if controller.view.observed else ())
            )
        )
        assert set(control.engine.containers) == replicas
        assert len(controller.view.endpoints["web"].replicas) == 2, "callers keep them too"


async def test_gpu_shortage_is_one_sentence_and_blocks(tmp_path: Path) -> None:
    control = Control.of(tmp_path, gpu_service("ranker", replicas=3))
    control.engine.gpus = gpus(2)
    async with control.running() as controller:
        await until(lambda: control.row("ranker")[1] == 2)
        await until(lambda: controller.view.services[0].blocked)
        assert "0 of 2 are free" in controller.view.services[0].blocked
        assert "replica_pending" in control.kinds("warning")
        assert sum(bool(gpu.holder) for gpu in controller.view.gpus) == 2


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


async def test_a_replacement_waits_until_its_predecessor_s_memory_was_seen_to_be_free(tmp_path: Path) -> None:
    control = Control.of(tmp_path, gpu_service("ranker", replicas=1))
    control.engine.gpus = (Gpu("GPU-0", memory_bytes=80 * GIB),)
    control.engine.gpu_memory = {"GPU-0": 0}
    async with control.running() as controller:
        await control.settled("ranker", 1)
        (name,) = control.engine.names()
        control.engine.gpu_memory = {"GPU-0": 70 * GIB}
        control.engine.kill(name)
        await until(lambda: "70 GiB in use" in "".join(pending.reason for pending in controller.view.plan.pending))
        assert control.engine.names() == [], "it is removed and not yet made anew"


async def test_where_memory_cannot_be_read_the_status_says_so_and_replicas_start(tmp_path: Path) -> None:
    control = Control.of(tmp_path, gpu_service("ranker", replicas=1))
    control.engine.gpus = gpus(1)
    async with control.running() as controller:
        await control.settled("ranker", 1)
        assert controller.view.gpu_memory_problem.startswith("nvidia-smi cannot be asked")


async def test_memory_is_read_for_those_only_who_ask_for_gpus(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web"))
    control.engine.gpus = gpus(1)
    async with control.running() as controller:
        await control.settled("web", 2)
        assert controller.view.gpu_memory_problem == "", "nobody has asked"


async def test_a_missing_image_blocks(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web", has_build=False, image="nowhere/web"))
    control.engine.images.clear()
    async with control.running() as controller:
        await until(lambda: controller.view.services and controller.view.services[0].blocked)
        assert "manifest unknown" in controller.view.services[0].blocked
        assert control.kinds("failed") == ["pull_image"]  # repeated failures are counted on the first


async def test_a_failed_action_is_tried_again_later(control: Control) -> None:
    control.engine.fail_next(StartContainer, EngineError("the disk is full"))
    control.engine.fail_next(CreateContainer, ImageNotFound("vanished"))
    control.router.failing[AddServer] = RoutingError("no such backend")
    async with control.running() as controller:
        await until(lambda: any("no such backend" in row.message for row in controller.view.services))
        control.router.failing.clear()
        await control.settled("web", 2)
        await control.settled("api", 1)
        assert set(control.kinds("failed")) == {"start_container", "create_container", "add_server"}


async def test_an_unknown_service_is_named_with_its_neighbours(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        with pytest.raises(UnknownService, match=r"no service 'wep' .* did you mean 'web'\? Services: api, web"):
            controller.commands.scale("wep", 1)


async def test_logs_of_every_replica(control: Control) -> None:
    control.engine.behaviours["web"] = Behaviour(output="one\ntwo\nthree\n")
    async with control.running() as controller:
        await control.settled("web", 2)
        texts = await controller.commands.logs("web", 2)
        assert sorted(texts) == control.router.ready("web")
        assert set(texts.values()) == {"two\nthree\n"}
        with pytest.raises(UnknownService):
            await controller.commands.logs("nobody", 2)


async def test_a_defect_in_the_planner_is_an_event_and_ends_nothing(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
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


async def test_a_burst_of_wakes_is_one() -> None:
    wakeup, clock = Wakeup(debounce_s=0.01), asyncio.get_running_loop().time
    for _ in range(100):
        wakeup.ring()
    await wakeup.wait(1.0)
    started = clock()
    await wakeup.wait(0.05)
    assert clock() - started >= 0.04, "nothing was left of the burst"


async def test_a_container_that_cannot_be_started_is_made_anew_until_one_can(control: Control) -> None:
    control.engine.behaviours["api"] = Behaviour(start_error="unresolvable CDI devices nvidia.com/gpu=GPU-1")
    async with control.running():
        await until(lambda: control.store.failures)
        assert ["could not start it (code 128)" in record.detail for record in control.store.failures.values()] == [
            True
        ]
        control.engine.behaviours["api"] = Behaviour()
        await control.settled("api", 1, within_s=10)
        assert [record.count >= 1 for record in control.store.failures.values()] == [True]


async def test_a_defect_in_reading_the_files_is_a_problem_and_ends_nothing(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        control.source.edit(error=KeyError("services"))
        await until(lambda: controller.view.spec_problems)
        assert controller.view.spec_problems == ("internal: reading the compose files raised KeyError: 'services'",)
        control.source.edit(service("web", replicas=1))
        await control.settled("web", 1)


async def test_a_defect_in_looking_for_changes_is_no_reason_not_to_read(control: Control) -> None:
    fingerprint = control.source.fingerprint

    async def broken() -> Hashable:
        raise KeyError("maybe")

    async with control.running() as controller:
        await control.settled("web", 2)
        control.source.error = SpecError(["services.web.x: expected true or false"])
        control.source.fingerprint = broken  # type: ignore[method-assign]
        await until(lambda: controller.view.spec_problems == ("services.web.x: expected true or false",))
        control.source.error = None
        control.source.fingerprint = fingerprint  # type: ignore[method-assign]
        await until(lambda: not controller.view.spec_problems)
        await control.settled("web", 2)


async def test_a_defect_in_asking_one_replica_ends_nothing(control: Control, caplog: pytest.LogCaptureFixture) -> None:
    ask = control.ask

    async def asked(subject: Subject) -> Reading:
        if subject.spec.port == 9101:
            raise KeyError("state")
        return await ask(subject)

    control.ask = asked  # type: ignore[method-assign]
    control.source.services["api"] = service("api", replicas=1, probe=ProbeSpec(9101, "/readyz"))
    async with control.running():
        await control.settled("web", 2)
        await until(lambda: "asking a replica raised" in caplog.text)
        control.ask = ask  # type: ignore[method-assign]
        control.engine.crash(control.router.ready("web")[0])
        await until(lambda: "replica_failed" in control.kinds())
        await control.settled("web", 2)


async def test_a_defect_in_telling_of_an_action_ends_nothing(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(outcome: Outcome) -> None:
        raise KeyError(outcome.action.target)

    async with control.running() as controller:
        await control.settled("web", 2)
        monkeypatch.setattr(controller.publisher.metrics, "action", broken)
        controller.commands.scale("web", 3)
        await control.settled("web", 3)
