"""`user_config`: from the block to a replica that runs, without a restart, wherever the controller dies on the way."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pierhead.edge.admission import Admission
from pierhead.replica.admin import AdminServer, admin_taker
from pierhead.replica.sleep import Sleep
from pierhead.replica.user_config import UserConfig, call_hook
from pierhead.replica.user_config import digest as digest_of_the_runtime

from controller.engines.labels import create_body
from controller.errors import ReplicaError
from controller.model.actions import GiveUserConfig
from controller.model.desired import VersionGoal
from controller.model.reports import UserConfigStatus
from controller.model.spec import NO_USER_CONFIG, RolloutSpec, ServiceSpec, digest
from controller.model.world import ReplicaContainer, ReplicaHealth, SleepReport, UserConfigReport, current_version
from controller.observe.admin_pages import HttpProbe
from controller.plan import plan
from controller.plan.user_config import differences, remembered, user_config_status
from controller.status.documents import plan_words
from controller.status.records.services import Service
from tests.unit.controller.compose_configs import problems, ranker
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import NOW, desired, observed, replica, service, version

pytestmark = pytest.mark.virtual_time

A, B = '{"threshold":1}', '{"threshold":2}'
NONE, DA, DB = digest(NO_USER_CONFIG), digest(A), digest(B)
ERROR = "Part.reconfigure raised ValueError: no such threshold"


# -------------------------------------------------------------------------------------------------------- the block


def test_equal_settings_are_the_same_text_in_any_order() -> None:
    written: dict[str, Any] = {"b": [1, 2.5, None, True], "a": {"ü": "x"}}
    text = ranker({"user_config": written}).user_config
    assert text == '{"a":{"\\u00fc":"x"},"b":[1,2.5,null,true]}'
    assert json.loads(text) == written
    assert ranker({"user_config": dict(reversed(written.items()))}).user_config == text
    assert ranker({}).user_config == ranker({"user_config": {}}).user_config == NO_USER_CONFIG


def test_it_is_no_part_of_the_version_and_reaches_new_replicas() -> None:
    without, with_it = ranker({}), ranker({"user_config": {"threshold": 1}})
    assert with_it.definition_hash == without.definition_hash
    assert with_it.container == without.container
    bodies = [create_body(spec, "p-ranker-1-1", "1", 1, (), "p") for spec in (without, with_it)]
    assert set(bodies[1]["Env"]) - set(bodies[0]["Env"]) == {f"PIERHEAD_USER_CONFIG={A}"}
    assert bodies[0] == {**bodies[1], "Env": bodies[0]["Env"]}


JSON_ONLY = "expected what JSON can hold: {}; write it in quotes, found a mapping"
AN_IMAGE = {"user_config": {"a": 1}, "health": {"probe": {"path": "/health", "port": 80}}}
DEEP: dict[str, Any] = functools.reduce(lambda inner, _: {"a": inner}, range(5000), {})


@pytest.mark.parametrize(
    ("x_serve", "problem"),
    [
        ({"user_config": [1]}, "expected a mapping that JSON can hold, such as {threshold: 0.7}, found a list"),
        ({"user_config": {"a": {"b": [1, float("nan")]}}}, JSON_ONLY.format("user_config.a.b[1] is nan")),
        ({"user_config": {"a": {3: 1}}}, JSON_ONLY.format("user_config.a has the key 3")),
        (
            {"user_config": {"a": "x" * 65536}},
            "expected at most 65536 bytes as JSON (these are 65544; put what is large",
        ),
        ({"user_config": DEEP}, "expected a mapping that is nested less deeply, found a mapping"),
        ({**AN_IMAGE, "managed": False}, "has no effect on an image that is not built on Pierhead's runtime"),
        ({**AN_IMAGE, "managed": True}, "needs the probe path of a managed replica (/readyz), which reports the user_"),
    ],
    ids=["list", "nan", "key", "large", "deep", "foreign image", "other probe"],
)
def test_wrong_ones(x_serve: dict[str, Any], problem: str) -> None:
    (found,) = problems(x_serve)
    assert found.startswith(f"services.ranker.x-serve.user_config: {problem}")


def test_controller_and_runtime_agree() -> None:
    assert digest(A) == digest_of_the_runtime(A)


# ---------------------------------------------------------------------------------------------------------- the plan


def told(wanted: str, applied: str | None = None, error: str = "") -> UserConfigReport:
    return UserConfigReport(digest(wanted), digest(applied or wanted), error)


WEB = service("web", user_config=B, managed=True)
V = version(WEB)


def planned(*containers: ReplicaContainer, goal: VersionGoal | None = None) -> str:
    wanted = desired(WEB)
    if goal is not None:
        wanted = replace(wanted, goals={"web": goal})
    made = plan(wanted, observed(*containers, specs=(WEB,)), NOW)
    return "\n".join(line for line in str(made).splitlines() if "user_config" in line)


@pytest.mark.parametrize(
    "leaves",
    [
        {"user_config": None},
        {"user_config": told(B, A, ERROR)},
        {"user_config": told(A), "version": "0ld0ld00"},
        {"user_config": told(A), "ip": None},
        {"user_config": told(A), "health": ReplicaHealth.FAILED},
    ],
    ids=["reports none", "refuses it", "another version", "no address", "has failed"],
)
def test_no_other_replica_is(leaves: Mapping[str, Any]) -> None:
    assert planned(replica(WEB, 1, **leaves), replica(WEB, 2, user_config=told(B))) == ""


REPORTS = st.none() | st.builds(told, st.sampled_from([A, B, NO_USER_CONFIG]), st.sampled_from([A, B]))


@given(st.lists(REPORTS, min_size=1, max_size=5), st.sampled_from([A, B, NO_USER_CONFIG]))
def test_a_step_of_the_plan_is_what_ends_the_difference(reports: list[UserConfigReport | None], text: str) -> None:
    spec = service("web", user_config=text, replicas=len(reports))

    def given_to(reports: list[UserConfigReport | None]) -> set[str]:
        containers = [replica(spec, number, user_config=report) for number, report in enumerate(reports, 1)]
        steps = plan(desired(spec), observed(*containers, specs=(spec,)), NOW).steps
        return {step.action.target for step in steps if isinstance(step.action, GiveUserConfig)}

    found = given_to(reports)
    assert len(found) == sum(report is not None and report.wanted != digest(text) for report in reports)
    assert given_to([report and told(text) for report in reports]) == set()


# --------------------------------------------------------------------------------------------------------- the status


def test_how_far_it_has_come() -> None:
    containers = [
        replica(WEB, 1, user_config=told(B)),
        replica(WEB, 2, user_config=told(B, A, ERROR)),
        replica(WEB, 3, user_config=told(B, NO_USER_CONFIG, ERROR), health=ReplicaHealth.UNKNOWN),
        replica(WEB, 4, user_config=told(A), version="0ld0ld00"),
    ]
    texts = remembered({}, [replace(WEB, user_config=A), WEB])
    status = user_config_status(containers, WEB, VersionGoal(V), {}, texts, NOW)
    assert status is not None
    assert (status.wanted, status.applied, status.replicas, status.everywhere) == (DB, 1, 2, False)
    assert status.refused == (
        f"p-web-{V}-2: {ERROR}; the former user_config stays in force",
        f"p-web-{V}-3: {ERROR}; it is not ready without it",
    )
    assert set(status.changes) == {"threshold: 1 -> 2", "threshold: nothing -> 2"}


def status_of(*containers: ReplicaContainer, spec: ServiceSpec = WEB) -> UserConfigStatus | None:
    return user_config_status(containers, spec, VersionGoal(V), {}, {}, NOW)


def test_an_image_of_before_user_config_is_reported() -> None:
    status = status_of(replica(WEB, 1, user_config=None), replica(WEB, 2, user_config=None, ongoing=None))
    assert status is not None
    assert status.refused == (
        f"p-web-{V}-1: the runtime in its image is older than user_config; build the image again",
    )
    assert (status.applied, status.replicas) == (0, 1)


def test_a_user_config_that_this_controller_has_not_seen_has_no_differences() -> None:
    status = status_of(replica(WEB, 1, user_config=told(A)))
    assert status is not None
    assert status.changes == ("from a user_config that this controller has not seen",)


def test_differences_are_named_by_path() -> None:
    then = '{"model":{"name":"small","top_k":5},"same":1,"gone":[1]}'
    now = '{"model":{"name":"large","top_k":5},"same":1,"new":{}}'
    assert differences(then, now) == ["gone: [1] -> nothing", 'model.name: "small" -> "large"', "new: nothing -> {}"]
    many = json.dumps({f"k{number:02}": number for number in range(30)})
    assert differences("{}", many)[-1] == "and 10 more"
    assert len(differences("{}", json.dumps({"a": "x" * 1000}))[0]) < 120


# ---------------------------------------------------------------------------------------------------- the whole of it


def web(text: str = NO_USER_CONFIG, definition: str = "d1", **changes: Any) -> ServiceSpec:
    changes = {"rollout": RolloutSpec(bake_s=0.1), "user_config": text, **changes}
    return service("web", definition_hash=definition, **changes)


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, web(A))


def in_force(control: Control) -> list[str | None]:
    containers = sorted(control.engine.containers.values(), key=lambda container: container.number)
    return [control.user_configs.get(container.id) for container in containers if container.state.is_up]


def row(control: Control) -> Service:
    (found,) = [row for row in control.view.services if row.name == "web"]
    return found


async def test_a_change_reaches_those_that_run_and_restarts_none(control: Control) -> None:
    async with control.running(web=2):
        before, events = set(control.engine.containers), len(control.said("create_container"))
        assert in_force(control) == [A, A]
        assert control.given == [], "they have begun with it"

        control.source.edit(web(B))
        words = f"web: user_config {DB} is in force in 2 of 2 replicas"
        await until(lambda: words in control.said("user_config_applied"))
        assert in_force(control) == [B, B]
        assert set(control.engine.containers) == before
        assert len(control.said("create_container")) == events
        assert control.said("user_config") == [f"web: user_config {DB}: threshold: 1 -> 2; no restart"]
        assert sorted(text for _, text in control.given) == [B, B], "once each"
        assert row(control).user_config == UserConfigStatus({"threshold": 2}, DB, applied=2, replicas=2)
        assert row(control).state == "HEALTHY"

        control.controller.commands.scale("web", 4)
        await control.settled("web", 4)
        assert in_force(control) == [B] * 4
        assert len(control.given) == 2, "those that come later have it from their start"

        control.source.edit(web())
        await until(lambda: in_force(control) == [NO_USER_CONFIG] * 4)
        await until(lambda: row(control).user_config is None)
        assert "web: no user_config is set any more" in control.said("user_config_applied")


async def test_one_that_is_refused_is_reported_and_nothing_is_restarted(control: Control) -> None:
    async with control.running(web=2):
        before = set(control.engine.containers)
        control.refused = {B}
        control.source.edit(web(B))
        await until(lambda: len(control.said("user_config_refused")) == 2)
        assert in_force(control) == [A, A]
        assert set(control.engine.containers) == before
        found = row(control)
        assert (found.state, found.ready) == ("DEPLOY_FAILED", 2)
        sentence = f"{ERROR}; the former user_config stays in force"
        assert sentence in found.message
        assert found.replicas[0].message == f"keeps its former user_config: {ERROR}"
        plan_text = plan_words(control.view, ())
        assert f"user_config of web: user_config {DB} is in force in 0 of 2 replicas; no restart" in plan_text
        assert "  threshold: 1 -> 2" in plan_text.splitlines()
        told = [obstacle.words for obstacle in found.obstacles]
        assert found.user_config is not None
        assert [words for words in told if sentence in words] == list(found.user_config.refused)

        control.refused = set()
        await until(lambda: row(control).state == "HEALTHY")
        assert in_force(control) == [B, B]
        assert len(control.given) == 2, "it was given once, and tried again over there"


async def test_a_replica_that_does_not_answer_is_tried_again(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    give, asked = control.give, []

    async def unreachable_twice(address: str, text: str, token: str) -> UserConfigReport:
        asked.append(address)
        if len(asked) <= 2:
            raise ReplicaError(f"http://{address}/user-config does not answer")
        return await give(address, text, token)

    monkeypatch.setattr(control, "give", unreachable_twice)
    async with control.running(web=2):
        control.source.edit(web(B))
        await until(lambda: in_force(control) == [B, B])
        assert any("does not answer" in message for message in control.said("give_user_config"))


async def test_a_rollback_brings_back_the_user_config_that_its_version_had_last(control: Control) -> None:
    """Code and config that change together go back together: the old code may not know the new settings."""
    cutoff = '{"cutoff":3}'

    async def runs(spec: ServiceSpec) -> None:
        wanted = current_version(spec, control.engine.images)
        await until(lambda: control.controller.deployer.state("web").stable == wanted)
        await until(lambda: in_force(control) == [spec.user_config] * 2, 10.0)

    async with control.running():
        await runs(web(A))
        for spec in (web(B), web(cutoff, "d2")):
            control.source.edit(spec)
            await runs(spec)
        assert all(text != cutoff for _, text in control.given), "no replica of the old version received it"
        await control.controller.commands.roll_back("web", None)
        await runs(web(B))


async def test_each_replica_has_a_token_of_its_own_which_the_next_controller_knows(tmp_path: Path) -> None:
    control = Control.of(tmp_path, web(A))
    async with control.running():
        await control.settled("web", 2)
        tokens = {each.name: each.admin_token for each in control.engine.containers.values()}
        assert len(set(tokens.values())) == 2
    async with control.running():
        assert {name: control.store.token_of(name) for name in tokens} == tokens


# ------------------------------------------------------------------------------------------------ on the wire, for real


class Part:
    def reconfigure(self, user_config: dict[str, Any]) -> None:
        self.had = user_config

    def sleep(self) -> None:
        """Nothing to give back."""

    wake = sleep


async def test_the_controller_gives_and_the_runtime_takes() -> None:
    config = UserConfig([Part()], NO_USER_CONFIG, call_hook)
    sleep = Sleep([Part()], call_hook, Admission(5))
    pages = [admin_taker("user_config", config.offer, config.report), admin_taker("sleep", sleep.offer, sleep.report)]
    server, probe = AdminServer({**pages[0], **pages[1]}, "its-token"), HttpProbe()
    port = await server.start("127.0.0.1", 0)
    try:
        assert await probe.give(f"127.0.0.1:{port}", A, "its-token") == UserConfigReport(DA, NONE)
        await config.settle()
        assert await probe.give(f"127.0.0.1:{port}", A, "its-token") == UserConfigReport(DA, DA)
        with pytest.raises(ReplicaError, match="refused it with 403: this is for the controller alone"):
            await probe.give(f"127.0.0.1:{port}", B, "of-another-replica")
        for wanted in (True, False):
            report = SleepReport(can=True, wanted=wanted, asleep=False)
            assert await probe.put_to_sleep(f"127.0.0.1:{port}", wanted, "its-token") == report
        with pytest.raises(ReplicaError, match="refused it with 403: this is for the controller alone"):
            await probe.put_to_sleep(f"127.0.0.1:{port}", True, "of-another-replica")
        with pytest.raises(ReplicaError, match="refused it with 400: user_config: expected a JSON object"):
            await probe.give(f"127.0.0.1:{port}", "[]", "its-token")
    finally:
        await server.close()
        refused = f"127.0.0.1:{port}/user-config does not answer: "
        with pytest.raises(ReplicaError, match=refused):
            await probe.give(f"127.0.0.1:{port}", A, "its-token")
