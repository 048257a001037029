"""The part of the REST API that asks for versions, in front of a whole controller on fakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.model.spec import RolloutSpec
from controller.model.world import version_of
from tests.unit.controller.control import Control, until
from tests.unit.controller.test_api import JSON, error_of, serving
from tests.unit.controller.worlds import service

WEB = service("web", rollout=RolloutSpec(bake_s=3600.0))
NEW = replace(WEB, definition_hash="d2", container={"Env": ["MODEL=b"]})


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, WEB)


def phase(control: Control) -> str:
    rollout = control.controller.deployer.state("web").rollout
    return rollout.phase.value if rollout else ""


async def test_a_rollout_from_its_begin_to_its_end_and_back(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)

        async def row() -> dict[str, Any]:
            return dict(await (await client.get("/api/v1/services/web")).json())

        first = await row()
        assert (first["state"], first["rollout"], first["rejected"], first["changes"]) == ("HEALTHY", None, None, [])
        assert first["version"] == first["offered"] == first["stable"]
        control.source.edit(NEW)
        answer = await client.post("/api/v1/deploy", json={"services": ["web"]})
        assert answer.status == 202
        assert "already" in (await answer.json())["services"]["web"]
        await until(lambda: phase(control) == "BAKING")
        await until(lambda: control.view.services[0].state == "UPDATING")
        during = await row()
        assert during["changes"] == ["environment.MODEL: added"]
        told = during["rollout"]
        assert (told["from"], told["to"], told["phase"]) == (first["stable"], during["offered"], "BAKING")
        assert (told["ready"], told["wanted"]) == (1, 2)
        plan = await (await client.get("/api/v1/plan?format=text")).text()
        assert plan.startswith(f"rollout of web: {told['from']} -> {told['to']}: ")
        assert "\n  environment.MODEL: added\n" in plan

        assert (await client.post("/api/v1/services/web/promote", json={})).status == 202
        await until(lambda: phase(control) == "SETTLING")
        assert (await client.post("/api/v1/services/web/abort")).status == 202
        await until(lambda: not phase(control) and control.view.services[0].converged)
        after = await row()
        assert (after["state"], after["rejected"]["version"]) == ("HEALTHY", told["to"]), "nothing has failed"
        assert after["rejected"]["reason"] == "an operator asked for it"
        control.set_clock(3600.0)
        await until(lambda: control.view.ahead_s > 3000)
        later = await (await client.get("/api/v1/services/web")).json()
        assert later["rejected"]["at"] == pytest.approx(after["rejected"]["at"] + 3600, abs=5)
        assert later["rejected"]["id"] == after["rejected"]["id"], "it is the same one"
        page = await (await client.get("/metrics")).text()
        assert 'pierhead_service_rolled_back{service="web"} 0.0' in page
        assert 'pierhead_service_rollout_age_seconds{service="web"} 0.0' in page
        listed = (await (await client.get("/api/v1/services/web/revisions")).json())["revisions"]
        assert [(one["version"], one["current"], one["stable"]) for one in listed] == [
            (told["to"], False, False),
            (told["from"], True, True),
        ]
        assert listed[0]["image"] == "image/web"
        answer = await client.post("/api/v1/services/web/rollback", json={"to": told["to"]})
        assert answer.status == 202
        assert f"{told['from']} -> {told['to']}" in (await answer.json())["message"]


async def test_nobody_goes_back_to_a_version_whose_image_is_gone(tmp_path: Path) -> None:
    web = replace(WEB, rollout=RolloutSpec(bake_s=0.0))
    control = Control.of(tmp_path, web)
    async with serving(control) as client:

        async def taken(content: str) -> tuple[str, str]:
            image = control.engine.add_image(web.image, content)
            wanted = version_of(web.definition_hash, image)
            await until(lambda: control.controller.deployer.state("web").stable == wanted and not phase(control))
            return wanted, image

        first, _ = await taken("1")
        second, pruned = await taken("2")
        await taken("3")
        control.engine.remove_image(pruned)
        for body in ({}, {"to": second}):
            status, _, message = await error_of(await client.post("/api/v1/services/web/rollback", json=body))
            assert status == 400
            assert message == (
                f"web: the image of version {second} is not on this machine any more (`docker image prune` removes "
                "such images), so it cannot be restored, and nothing was changed; versions that can be: "
                f"{first}. Or build its code again, and `pierhead deploy web`"
            )
            assert control.controller.deployer.state("web").rollout is None
        control.engine.go_away()
        status, _, _ = await error_of(await client.post("/api/v1/services/web/rollback", json={"to": first}))
        assert status == 503, "nobody can say whether it is there"
        control.engine.come_back()
        assert (await client.post("/api/v1/services/web/rollback", json={"to": first})).status == 202


@pytest.mark.parametrize("is_manual", [False, True])
async def test_a_service_that_sleeps_takes_a_version_without_trying_it(control: Control, is_manual: bool) -> None:
    control.is_manual = is_manual
    async with serving(control) as client:

        async def untried() -> bool:
            return bool((await (await client.get("/api/v1/services/web")).json())["untried"])

        await control.settled("web", 2)
        await until(lambda: control.controller.deployer.state("web").stable)
        control.controller.commands.scale("web", 0)
        await control.settled("web", 0)
        assert not await untried(), "its version has served"
        control.source.edit(NEW)
        for _ in range(2):  # somebody may ask twice
            answer = await client.post("/api/v1/deploy", json={"services": ["web"]})
            said = (await answer.json())["services"]["web"]
            assert said.endswith(
                " is taken, and not tried yet, as no replica is wanted now: it will be when the service wakes"
            )
        await until(lambda: control.controller.deployer.state("web").is_unproven)
        await until(lambda: all(row.untried for row in control.view.services))
        assert await untried()
        control.controller.commands.scale("web", 1)
        await control.settled("web", 1)
        await until(lambda: not control.controller.deployer.state("web").is_unproven)
        answer = await client.post("/api/v1/deploy", json={"services": ["web"]})
        assert (await answer.json())["services"]["web"].endswith("nothing changes")


async def test_what_cannot_be_done_says_why(control: Control) -> None:
    refusals = [
        ("deploy", b'{"services": ["wep"]}', 404, "did you mean 'web'?"),
        ("services/wep/rollback", b"", 404, "did you mean 'web'?"),
        ("services/web/rollback", b"", 400, "web: there was no earlier version; known are "),
        ("services/web/rollback", b'{"to": "0"}', 400, "web: no record says how version 0 is made; known are "),
        ("services/web/abort", b"{}", 400, "web: no rollout is in progress, so there is nothing to abort"),
        ("services/web/promote", b"{}", 400, "web: no version is being watched (BAKING)"),
        ("services/wep/restart", b"{}", 404, "did you mean 'web'?"),
    ]
    async with serving(control, web=2) as client:
        for path, body, status, words in refusals:
            found, _, message = await error_of(await client.post(f"/api/v1/{path}", data=body, headers=JSON))
            assert (found, words in message) == (status, True), message
        assert control.controller.deployer.state("web").rollout is None
