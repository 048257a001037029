"""Rollouts by the whole controller on fakes: versions that work, versions that do not, and operators who intervene."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from controller.desired.deployer import REFUSED_FOR_S
from controller.errors import EngineError, EngineUnreachable, InvalidRequest, RoutingError, SpecError
from controller.files.parse import parse
from controller.model.actions import AddServer, CreateContainer
from controller.model.spec import GpuRequest, RolloutSpec, ServiceSpec
from controller.model.world import ServerState, version_of
from controller.routing.base import RoutingAction
from controller.status.documents import plan_words
from tests.fakes.fake_engine import Behaviour
from tests.unit.controller.control import Control, until, version
from tests.unit.controller.worlds import gpu_service, gpus, service

pytestmark = pytest.mark.virtual_time

BROKEN = Behaviour(exits_after_s=0.0, exit_code=1, output="no such model\n")
QUICK = RolloutSpec(bake_s=0.1)
LONG = RolloutSpec(bake_s=3600.0)


def web(definition: str = "d1", **changes: object) -> ServiceSpec:
    return service("web", **{"definition_hash": definition, "rollout": QUICK, **changes})


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, web())


def versions(control: Control, name: str = "web") -> set[str]:
    """Versions of the replicas that are up."""
    return {c.version for c in control.engine.containers.values() if c.service == name and c.state.is_up}


def phase(control: Control, name: str = "web") -> str:
    rollout = control.controller.deployer.state(name).rollout
    return rollout.phase.value if rollout else ""


def message(control: Control, name: str = "web") -> str:
    """What the status says of a service and each of its replicas."""
    rows = [row for row in control.view.services if row.name == name]
    return " ".join([row.message for row in rows] + [one.message for row in rows for one in row.replicas])


def state_of(control: Control) -> str:
    return control.view.services[0].state


def refusals(control: Control) -> int:
    """How often in a row an action has failed."""
    return max((refusal.failures for refusal in control.view.refusals), default=0)


def taking(control: Control) -> set[str]:
    """Names of the servers that get requests from outside."""
    return {
        server.name for server in control.router.servers.values() if server.up and server.state is ServerState.READY
    }


async def stable_at(control: Control, spec: ServiceSpec, within_s: float = 10.0) -> None:
    """Wait until that version is what runs, all of it and nothing else."""
    wanted = version(control, spec)
    await until(
        lambda: control.controller.deployer.state(spec.name).stable == wanted and not phase(control, spec.name),
        within_s,
    )
    await control.settled(spec.name, spec.replicas)
    assert versions(control, spec.name) == {wanted}


async def test_after_down_the_version_of_the_files_starts_at_once(tmp_path: Path) -> None:
    """The caller does not wait for its callee's rollout: there is none."""
    before = [service("caller", rollout=LONG, callees=("web",)), web(rollout=LONG)]
    control = Control.of(tmp_path, *before)
    async with control.running():
        for spec in before:
            await stable_at(control, spec)
    control.engine.containers.clear()
    after = [replace(spec, definition_hash="d2") for spec in before]
    control.source.edit(*after)
    async with control.running():
        for spec in after:
            await stable_at(control, spec)
        made = " ".join(control.said("create_container"))
        for old, new in zip(before, after, strict=True):
            assert made.count(version(control, old)) == old.replicas, "the replicas from before `make down`"
            assert made.count(version(control, new)) == new.replicas
            begun = f"{old.name}: {version(control, old)} -> {version(control, new)}: at once, as nothing of "
            assert [words for words in control.said("rollout") if words.startswith(begun)]


async def test_a_canary_serves_its_share_next_to_all_old_replicas_until_it_is_promoted(control: Control) -> None:
    def weights() -> list[int]:
        return sorted(server.weight for server in control.router.servers.values())

    async with control.running() as controller:
        await stable_at(control, web())
        new = web("d2", rollout=replace(LONG, canary_weight=10))
        control.source.edit(new)
        await until(lambda: phase(control) == "BAKING")
        await until(lambda: weights() == [2, 9, 9])
        assert state_of(control) == "UPDATING"
        old = version(control, web())
        victim = next(name for name in taking(control) if old in name)
        control.engine.crash(victim, code=3)
        await until(lambda: victim not in taking(control))
        await until(lambda: sum(old in name for name in taking(control)) == 2)
        assert phase(control) == "BAKING", "the replica that died is replaced by one of its own version"
        controller.commands.promote("web")
        await until(lambda: phase(control) == "SETTLING")
        await until(lambda: versions(control) == {version(control, new)})
        await until(lambda: weights() == [1, 1])
        control.source.edit(replace(new, rollout=QUICK))  # the same version, watched for a shorter time
        await until(lambda: control.said("rolled_out"))
        assert control.said("rolled_out")[0].startswith(f"web: {old} -> {version(control, new)} is done")
        assert controller.deployer.state("web").previous == (old,)
        await until(lambda: state_of(control) == "HEALTHY")


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [(BROKEN, "exited by itself with code 1"), (Behaviour(start_error="exec: not found"), "could not start it")],
    ids=["crashes", "cannot start"],
)
async def test_a_version_that_never_gets_ready_is_rolled_back_and_never_serves(
    control: Control, behaviour: Behaviour, words: str
) -> None:
    async with control.running() as controller:
        await stable_at(control, web())
        kept = set(control.engine.containers)
        bad = version(control, web("d2"))
        control.engine.behaviours[bad] = behaviour
        control.source.edit(web("d2"))
        await until(lambda: control.said("rolled_back"), within_s=20)
        await until(lambda: set(control.engine.containers) == kept)  # the old replicas, untouched
        assert not [name for _, name in control.router.servers if bad in name]
        assert "it does not become ready (3 tries); last: " in control.said("rollback")[0]
        assert words in control.said("rollback")[0]
        assert behaviour.output.strip() in control.said("rollback")[0]
        await until(lambda: state_of(control) == "DEPLOY_FAILED")
        assert 'pierhead_service_rolled_back{service="web"} 1.0' in controller.publisher.metrics.page().decode()
        await until(lambda: "try it again with `pierhead deploy web`" in message(control))
        assert control.view.services[0].converged
        control.source.edit(web("d3"))
        await stable_at(control, web("d3"))


async def test_a_version_with_more_errors_is_rolled_back_and_a_second_try_counts_from_zero(control: Control) -> None:
    old, new = (web(definition, rollout=RolloutSpec(bake_s=5.0)) for definition in ("d1", "d2"))
    control.source.edit(old)
    async with control.running() as controller:
        await stable_at(control, old)
        good, bad = version(control, old), version(control, new)
        control.work["web"] = 4  # in flight, so replicas that leave drain
        control.answers = {good: (1000, 1), bad: (0, 0)}
        control.source.edit(new)
        await until(lambda: phase(control) == "BAKING")
        control.answers = {good: (1400, 2), bad: (200, 0)}
        await until(lambda: "fails 0 of 200" in controller.deployer.directions.rows["web"].message)
        control.answers[bad] = (400, 100)
        await until(lambda: phase(control) == "ROLLING_BACK")
        assert "it fails 100 of 400 requests (25.0 %), the former version" in control.said("rollback")[0]
        await controller.commands.deploy(["web"])
        await until(lambda: phase(control) in ("STARTING", "BAKING"))
        assert bad in versions(control), "the replicas of the first attempt have not left yet"
        control.answers[bad] = (0, 0)
        control.work.clear()
        await stable_at(control, new, within_s=60)
        assert len(control.said("rollback")) == 1


async def test_a_version_that_haproxy_refuses_takes_nothing_away(control: Control) -> None:
    async with control.running():
        await stable_at(control, web())
        await until(lambda: len(taking(control)) == 2)
        old = taking(control)
        control.router.failing[AddServer] = RoutingError("no more servers (test)")
        control.source.edit(web("d2"))
        await until(lambda: refusals(control) >= 3)
        assert taking(control) == old
        assert (phase(control), state_of(control)) == ("STARTING", "UPDATING")
        control.router.failing.clear()
        await stable_at(control, web("d2"))


async def test_a_version_that_fails_haproxys_check_goes_back(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    perform = control.router.perform

    async def and_down(action: RoutingAction) -> None:
        await perform(action)
        if isinstance(action, AddServer) and version(control, new) in action.target:
            control.router.mark_down(action.target)

    new = web("d2", startup_deadline_s=1.0)
    async with control.running():
        await stable_at(control, web())
        await until(lambda: len(taking(control)) == 2)
        old = taking(control)
        monkeypatch.setattr(control.router, "perform", and_down)
        control.source.edit(new)
        await until(lambda: "HAProxy's own check of it fails" in message(control))
        await until(lambda: control.said("rolled_back"))
        assert control.said("rolled_back")[0].endswith("1 s after its start HAProxy does not send to it")
        assert taking(control) == old


async def test_a_version_that_the_engine_refuses_for_long_goes_back_and_may_be_retried(
    control: Control,
) -> None:
    async with control.running() as controller:
        await stable_at(control, web())
        for _ in range(50):
            control.engine.fail_next(CreateContainer, EngineError("no space left on device (test)"))
        control.source.edit(web("d2"))
        await until(lambda: refusals(control) == 4, within_s=15)
        assert control.said("rollback") == [], "an engine in trouble for seconds is no reason to reject a version"
        await until(lambda: control.said("rolled_back"), within_s=3 * REFUSED_FOR_S)
        assert "it does not become ready (6 tries); last: it cannot be made" in control.said("rollback")[0]
        control.engine.fail_no_more()
        await controller.commands.deploy(["web"])
        await stable_at(control, web("d2"), within_s=3 * REFUSED_FOR_S)
        assert len(control.said("rollback")) == 1


# ------------------------------------------------------------------------------------------ what operators ask for


async def test_going_back_twice_does_not_bring_the_first_version_back(control: Control) -> None:
    """From v3 to v2, and then to v1, which does not work any more."""
    async with control.running() as controller:
        made = []
        for definition in ("d1", "d2", "d3"):
            control.source.edit(web(definition))
            await stable_at(control, web(definition))
            made.append(version(control, web(definition)))
        await controller.commands.roll_back("web", None)
        await stable_at(control, web("d2"))
        control.engine.behaviours[made[0]] = BROKEN
        await controller.commands.roll_back("web", made[0])
        await until(lambda: control.said("rolled_back"), within_s=30)
        await asyncio.sleep(60)
        assert controller.deployer.state("web").stable == made[1]
        assert versions(control) == {made[1]}


async def test_back_to_an_earlier_version_and_its_image(control: Control) -> None:
    async with control.running() as controller:
        await stable_at(control, web())
        first, first_image = version(control, web()), control.engine.images["image/web"]
        control.engine.add_image("image/web", "2")
        await stable_at(control, web())
        second = version(control, web())
        await controller.commands.roll_back("web", None)
        await until(lambda: controller.deployer.state("web").stable == first and not phase(control))
        await control.settled("web", 2)
        made = [a for a in control.engine.done if isinstance(a, CreateContainer) and a.version == first]
        assert [a.spec and a.spec.container["Image"] for a in made[-2:]] == [first_image, first_image]
        # The files' own version waits, and scaling keeps to the earlier one.
        controller.commands.scale("web", 3)
        await control.settled("web", 3)
        assert versions(control) == {first}
        await controller.commands.deploy(["web"])
        await until(lambda: controller.deployer.state("web").stable == second and not phase(control))


async def test_a_version_whose_image_was_pruned_cannot_come_back_and_says_so(control: Control) -> None:
    async with control.running() as controller:
        await stable_at(control, web())
        pruned = control.engine.images["image/web"]
        control.engine.add_image("image/web", "2")
        await stable_at(control, web())
        await controller.commands.roll_back("web", None)
        control.engine.remove_image(pruned)  # before the loop has made a replica of it
        words = f"image {pruned}, which this version was made of, is not on this machine any more"
        await until(lambda: words in message(control))
        assert "this version cannot come back; `pierhead revisions web` lists others" in message(control)
        assert "docker compose build" not in message(control)
        assert versions(control) == {version(control, web())}, "the serving replicas stay"


async def test_a_version_whose_record_cannot_be_read_is_not_gone_back_to(control: Control) -> None:
    async with control.running() as controller:
        await stable_at(control, web())
        first = version(control, web())
        control.source.edit(web("d2"))
        await stable_at(control, web("d2"))
        kept = control.store.revisions[("web", first)]
        control.store.revisions.drop(("web", first))
        control.store.revisions.put(("web", first), replace(kept, spec='{"name": 7}'))
        with pytest.raises(InvalidRequest, match=f"recorded version {first} in a format .*; readable are "):
            await controller.commands.roll_back("web", None)
        assert not phase(control)


async def test_a_missing_image_does_not_keep_a_service_from_scaling(control: Control) -> None:
    async with control.running() as controller:
        await stable_at(control, web())
        works = version(control, web())
        control.source.edit(web(image="image/typo"))
        missing = "image image/typo is not on this machine"
        words = f"{missing}: version {works} stays; build it (`docker compose build web`)"
        await until(lambda: controller.view.services[0].message == words)
        controller.commands.scale("web", 3)
        await control.settled("web", 3)
        assert versions(control) == {works}


async def test_a_callee_keeps_its_port_until_its_callers_have_sockets(tmp_path: Path) -> None:
    callee, caller = service("ranker", rollout=QUICK), web(callees=("ranker",))
    control = Control.of(tmp_path, callee, caller)
    async with control.running():
        await stable_at(control, caller)
        made = len(control.engine.done)
        now = [replace(one, has_socket=True, definition_hash="d2") for one in (callee, caller)]
        control.source.edit(*now)
        await until(lambda: "web, which calls it at its port, goes first" in message(control, "ranker"))
        await until(lambda: versions(control, "ranker") == {version(control, now[0])}, 20.0)
        created = [action.service for action in control.engine.done[made:] if isinstance(action, CreateContainer)]
        assert created.index("ranker") == created.count("web")


@pytest.mark.parametrize("when", ["earlier", "together"])
async def test_a_callee_keeps_its_port_while_a_caller_that_was_rolled_back_needs_it(tmp_path: Path, when: str) -> None:
    callee, caller = service("ranker", rollout=QUICK), web(callees=("ranker",))
    control = Control.of(tmp_path, callee, caller)
    async with control.running() as controller:
        await stable_at(control, caller)
        with_sockets, bad = (replace(one, has_socket=True, definition_hash="d2") for one in (callee, caller))
        control.engine.behaviours[version(control, bad)] = BROKEN
        if when == "earlier":
            control.source.edit(callee, bad)
            await until(lambda: control.said("rolled_back"), within_s=15)
        control.source.edit(with_sockets, bad)
        waits = (
            "the new version of web, which calls it at its port, was rolled back; it waits for the next version of web"
        )
        await until(lambda: waits in message(control, "ranker"), within_s=15)
        assert versions(control, "ranker") == {version(control, callee)}
        await controller.commands.deploy(["ranker"])
        await stable_at(control, with_sockets)


async def test_a_callee_is_rolled_out_before_its_caller(tmp_path: Path) -> None:
    ranker = service("ranker", rollout=QUICK)
    caller = web(callees=("ranker", "postgres"))
    control = Control.of(tmp_path, ranker, caller)
    async with control.running() as controller:
        await stable_at(control, ranker)
        await stable_at(control, caller)
        new_ranker, new_caller = replace(ranker, definition_hash="d2"), replace(caller, definition_hash="d2")
        control.source.edit(new_ranker, new_caller)
        await until(lambda: phase(control, "ranker") in ("STARTING", "BAKING") and phase(control) == "WAITING")
        assert versions(control) == {version(control, caller)}
        await stable_at(control, new_ranker)
        await stable_at(control, new_caller)
        created = [a.service for a in control.engine.done if isinstance(a, CreateContainer)][-4:]
        assert created == ["ranker", "ranker", "web", "web"]
        # A callee that was rolled back keeps its caller waiting until an operator deploys the caller.
        bad, newer_caller = replace(ranker, definition_hash="d3"), replace(caller, definition_hash="d3")
        control.engine.behaviours[version(control, bad)] = BROKEN
        control.source.edit(bad, newer_caller)
        await until(lambda: control.said("rolled_back"), within_s=15)
        await until(lambda: "was rolled back; it waits for" in controller.deployer.directions.rows["web"].message)
        assert phase(control) == "WAITING"
        await controller.commands.deploy(["web"])
        await stable_at(control, newer_caller)


async def test_with_manual_rollouts_new_versions_wait_for_deploy(control: Control) -> None:
    control.is_manual = True
    async with control.running() as controller:
        await stable_at(control, web())
        old, new = version(control, web()), web("d2", container={"Cmd": ["serve", "--new"]})
        control.source.edit(new)
        await until(lambda: "waits for `pierhead deploy web`" in controller.deployer.directions.rows["web"].message)
        await until(lambda: "waits for" in plan_words(controller.view, ()))
        beforehand = plan_words(controller.view, ()).splitlines()
        assert beforehand[0].startswith(f"rollout of web: {old} -> {version(control, new)} waits for")
        assert beforehand[1:] == ["  command: nothing -> serve --new"]
        assert versions(control) == {old}
        control.engine.go_away()
        with pytest.raises(EngineUnreachable, match=r"nothing was changed: the Docker Engine does not answer"):
            await controller.commands.deploy(["web"])
        assert controller.deployer.state("web").approved is None
        control.engine.come_back()
        await until(lambda: "waits for `pierhead deploy web`" in controller.deployer.directions.rows["web"].message)
        await controller.commands.deploy(["web"])
        await stable_at(control, new)
        # Files that were edited a moment before `deploy` are read first.
        control.source.edit(web("d3"))
        words = await controller.commands.deploy(["web"])
        assert words == {"web": f"{version(control, new)} -> {version(control, web('d3'))} begins"}
        await stable_at(control, web("d3"))
        patient = web("d4", rollout=LONG)
        control.source.edit(patient)
        await controller.commands.deploy(["web"], is_watched=False)
        await stable_at(control, patient)
        control.source.edit(error=SpecError(["services.web.image: expected a name, found nothing"]))
        with pytest.raises(SpecError, match="expected a name"):
            await controller.commands.deploy(None)


async def test_a_version_that_does_not_fit_replaces_no_replica_and_is_rolled_back(tmp_path: Path) -> None:
    rollout = replace(QUICK, max_unavailable=1)
    ranker = gpu_service(replicas=4, startup_deadline_s=0.5, rollout=rollout)
    control = Control.of(tmp_path, ranker)
    control.engine.gpus = gpus(4)
    ready: list[int] = []

    def is_over() -> bool:
        ready.append(control.row("ranker")[1])
        return control.controller.deployer.state("ranker").rejected is not None and not phase(control, "ranker")

    async with control.running(ranker=4):
        made = set(control.engine.containers)
        control.source.edit(replace(ranker, gpu=GpuRequest(count=4), definition_hash="d2"))
        await until(is_over, 20.0)
        assert set(ready) == {4}
        assert set(control.engine.containers) == made
        words = "it does not fit for 0.5 s (startup.deadline_s): it asks for 4 GPUs and 0 of 4 are free"
        assert words in message(control, "ranker")


# --------------------------------------------------------------------------- what happens to a version, and its fault


@pytest.mark.parametrize("is_good", [True, False])
async def test_a_rollout_survives_a_controller_that_dies_after_every_action(control: Control, is_good: bool) -> None:
    async with control.running():
        await stable_at(control, web())
    new = web("d2")
    if not is_good:
        control.engine.behaviours[version(control, new)] = BROKEN
    control.source.edit(new)

    def is_over() -> bool:
        state = control.controller.deployer.state("web")
        ended = state.stable == version(control, new) if is_good else state.rejected is not None
        return ended and state.rollout is None and control.row("web") == (2, 2, 2)

    lives, phases, ended = 0, set[str](), False
    while lives < 100 and not ended:
        lives += 1
        control.actions_to_live = 1
        async with control.running():
            await until(is_over, within_s=20)
            ended = True
        phases.add(phase(control))
    assert lives >= (10 if is_good else 6), "every action was the last one of a controller"
    assert phases >= ({"STARTING", "ROLLING"} if is_good else {"STARTING"})
    assert versions(control) == {version(control, new if is_good else web())}
    assert len(control.router.ready("web")) == 2


@pytest.mark.parametrize("in_phase", ["BAKING", "ROLLING", "SETTLING"])
async def test_an_engine_restart_does_not_count_as_the_versions_failure(control: Control, in_phase: str) -> None:
    """Without live-restore the engine ends every replica when it restarts."""
    old = web("d1", replicas=5, rollout=RolloutSpec(bake_s=0.5))
    new = replace(old, definition_hash="d2")
    control.source.edit(old)
    async with control.running():
        await stable_at(control, old)
        made = version(control, new)
        control.engine.behaviours[made] = Behaviour(ready_after_s=0.3)
        control.source.edit(new)
        # In ROLLING, while there are three of the new version: as many as a version may fail in a row.
        enough = 3 if in_phase == "ROLLING" else 1

        def have_come() -> bool:
            up = [one.version for one in control.engine.containers.values() if one.state.is_up]
            return phase(control) == in_phase and up.count(made) >= enough

        await until(have_come, within_s=20)
        for one in [one for one in control.engine.containers.values() if one.state.is_up]:
            control.engine.crash(one.name, 137)
        await stable_at(control, new, within_s=30)
        assert control.said("rollback") == []


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_failure_is_its_versions_unless_another_service_fails_too(tmp_path: Path, is_alone: bool) -> None:
    control = Control.of(tmp_path, web(), service("other", replicas=1))
    async with control.running():
        await stable_at(control, web())
        await control.settled("other", 1)
        new = web("d2", rollout=LONG)
        control.source.edit(new, control.source.services["other"])
        await until(lambda: phase(control) == "BAKING")
        made = version(control, new)
        for one in list(control.engine.containers.values()):
            if one.version == made or (one.service == "other" and not is_alone):
                control.engine.crash(one.name, 1)
        await asyncio.sleep(15)
        assert versions(control) == ({version(control, web())} if is_alone else {version(control, web()), made})
        words = [message for message in control.said("rollback") if "a replica of it failed" in message]
        assert len(words) == is_alone


async def test_callers_and_haproxy_use_the_limits_that_every_serving_replica_can_keep(tmp_path: Path) -> None:
    def limited(timeout_s: float, most: int) -> ServiceSpec:
        block = {"route": "/web", "replicas": 2, "request_timeout_s": timeout_s, "max_ongoing_requests": most}
        definition = {"image": "image/web", "build": {"context": "."}, "scale": 0, "x-serve": block}
        return parse("p", {"name": "p", "services": {"web": definition}}).services["web"]

    old, new = limited(300.0, 10), replace(limited(1.0, 100), rollout=LONG)
    control = Control.of(tmp_path, old)

    def at_the_edge() -> tuple[float, int]:
        desired = control.view.desired
        assert desired is not None
        return desired.services["web"].request_timeout_s, desired.services["web"].max_ongoing_requests

    def published() -> dict[str, int]:
        """By version: the limit of a replica, as callers get it."""
        return {one.version: one.max_ongoing_requests for one in control.view.endpoints["web"].endpoints}

    async with control.running():
        await stable_at(control, old)
        first, second = version(control, old), version(control, new)
        control.source.edit(new)
        await until(lambda: phase(control) == "BAKING")
        await until(lambda: published() == {first: 10, second: 100})
        assert at_the_edge() == (300.0, 10)
        control.work["web"] = 20
        control.controller.commands.promote("web")
        await until(lambda: control.said("begin_retirement"), within_s=10)
        await asyncio.sleep(10.0)
        assert control.said("signal_container") == [], "requests that the old version accepted have its longer timeout"
        control.work.clear()
        await until(lambda: published() == {second: 100}, within_s=10)
        assert at_the_edge() == (1.0, 100)


# --------------------------------------------------------------------------------------------------------------- files

TOKEN = "/run/secrets/token"


def changes(control: Control) -> tuple[str, ...]:
    return control.view.services[0].changes


def test_without_files_a_version_is_what_it_always_was() -> None:
    """Another formula would replace every replica of a stack that an earlier build started."""
    assert version_of("d1", "sha256:1") == "57844d89"


async def test_a_changed_secret_is_rolled_out(control: Control) -> None:
    then, now = (web(files={TOKEN: digest}) for digest in ("a", "b"))
    control.source.edit(then)
    async with control.running():
        await stable_at(control, then)
        control.source.edit(now)
        await until(lambda: changes(control) == (f"{TOKEN}: changed",))
        await stable_at(control, now)


async def test_replicas_of_an_earlier_build_stay_while_their_files_do(control: Control) -> None:
    """Their version does not count the files. It stays theirs until a file is changed after they were made."""
    async with control.running():
        await stable_at(control, web())
    made = sorted(one.id for one in control.engine.containers.values())
    created_at = min(one.created_at for one in control.engine.containers.values())
    control.source.edit(web(files={TOKEN: "a"}, files_changed_at=created_at - 1))
    async with control.running(web=2):
        await control.controller.loop.look_again()
        assert (sorted(one.id for one in control.engine.containers.values()), phase(control)) == (made, "")
        changed = web(files={TOKEN: "b"}, files_changed_at=created_at + 1)
        control.source.edit(changed)
        await stable_at(control, changed)


async def test_a_restart_replaces_every_replica_once(control: Control) -> None:
    """It is a rollout of the same definition that does not bake, and the next controller does not repeat it."""
    service = web(files={TOKEN: "a"}, rollout=LONG)
    control.source.edit(service)
    async with control.running() as controller:
        await stable_at(control, service)
        before = set(control.engine.containers)
        words = await controller.commands.restart("web")
        assert words.startswith("its replicas are replaced: ")
        await until(lambda: not phase(control) and not before & set(control.engine.containers))
        await control.settled("web", 2)
        after = set(control.engine.containers)
        assert len(versions(control)) == 1
    async with control.running(web=2) as controller:
        await controller.loop.look_again()
        assert set(control.engine.containers) == after
        assert phase(control) == ""


async def test_a_restart_that_is_refused_changes_nothing(control: Control) -> None:
    async with control.running() as controller:
        await stable_at(control, web())
        before = set(control.engine.containers)
        control.source.edit(web(), error=SpecError(["services.web: it is wrong"]))
        with pytest.raises(SpecError):
            await controller.commands.restart("web")
        control.source.edit(web())
        control.engine.go_away()
        with pytest.raises(EngineUnreachable, match="nothing was changed"):
            await controller.commands.restart("web")
        assert dict(control.store.restarts) == {}
        control.engine.come_back()
        await controller.loop.look_again()
        assert (set(control.engine.containers), phase(control)) == (before, "")


async def test_what_runs_another_version_than_the_files_is_not_restarted(control: Control) -> None:
    """It would begin the version of the files, which was not asked for."""
    async with control.running() as controller:
        await stable_at(control, web())
        control.source.edit(web("d2", rollout=LONG))
        await until(lambda: phase(control) == "BAKING")
        with pytest.raises(InvalidRequest, match="it does not run the version of the files, or not alone"):
            await controller.commands.restart("web")
        controller.commands.abort("web")
        await until(lambda: not phase(control))
        with pytest.raises(InvalidRequest, match="pierhead deploy web"):
            await controller.commands.restart("web")
        assert dict(control.store.restarts) == {}
