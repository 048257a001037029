"""Versions whose contracts can, and cannot, meet: by the whole controller on fakes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from pierhead.classes.compare import IMAGE_PATH

from controller.errors import EngineError, InvalidRequest
from controller.model.actions import CreateContainer
from controller.model.spec import RolloutSpec, ServiceSpec
from controller.model.world import ServerState
from controller.status.documents import plan_words
from tests.fakes.fake_engine import Behaviour
from tests.harness.applications import GROWN, SHRUNK, contract
from tests.unit.controller.control import Control, until, version
from tests.unit.controller.worlds import service

pytestmark = pytest.mark.virtual_time

NAME = "ranker"
FIELD = "shop.Ranker.rank(user): was removed"
QUICK = RolloutSpec(bake_s=0.1)


def ranker(definition: str = "d1", **changes: object) -> ServiceSpec:
    return service(NAME, **{"definition_hash": definition, "rollout": QUICK, **changes})


def build(control: Control, spec: ServiceSpec, content: str, parameters: str = "", *, told: str = "") -> str:
    """Build another image of the service; returns the version. Its image carries a contract with these parameters, or
    its replicas alone tell one."""
    image = control.engine.add_image(spec.image, content)
    if parameters:
        control.engine.files[image] = {IMAGE_PATH: contract(parameters)}
    made = version(control, spec)
    if told or parameters:
        control.contracts[made] = contract(told or parameters, NAME)
    return made


USUAL = "user: int, items: list[int]"


@pytest.fixture
def control(tmp_path: Path) -> Control:
    """A service whose first version is not there yet; its image carries its contract."""
    control = Control.of(tmp_path, ranker())
    build(control, ranker(), "1", USUAL)
    return control


def state_of(control: Control) -> str:
    return next(row.state for row in control.view.services if row.name == NAME)


def message(control: Control) -> str:
    return next(row.message for row in control.view.services if row.name == NAME)


def stable(control: Control, name: str = NAME) -> str | None:
    state = control.controller.deployer.state(name)
    return state.stable if state.rollout is None else None


async def settled_at(control: Control, wanted: str, of: int = 2) -> None:
    await until(lambda: stable(control) == wanted, 20.0)
    await until(lambda: len(control.engine.containers) == of, 20.0)
    await control.settled(NAME, ranker().replicas)
    assert {one.version for one in control.engine.containers.values()} == {wanted}


def takers(control: Control) -> set[str]:
    """The versions that get new requests, from outside or from callers."""
    servers = {
        server.name.rsplit("-", 2)[1]
        for server in control.router.servers.values()
        if server.state is ServerState.READY and server.up
    }
    endpoints = control.view.endpoints.get(NAME)
    return servers | {one.version for one in (endpoints.endpoints if endpoints else ()) if one.state == one.READY}


@contextlib.asynccontextmanager
async def never_both(control: Control, *pair: str) -> AsyncIterator[None]:
    """These two versions never get requests at the same time."""

    async def watch() -> None:
        while True:
            assert not set(pair) <= takers(control), f"{pair} meet: {control.said('refused')}"
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def test_an_image_whose_contract_cannot_meet_the_running_one_is_refused(control: Control) -> None:
    async with control.running() as controller:
        first = version(control, ranker())
        await settled_at(control, first)
        made = len(control.engine.done)
        second = build(control, ranker(), "2", SHRUNK)
        await until(lambda: control.said("refused"))
        [said] = control.said("refused")
        assert said.startswith(f"{NAME}: {first} -> {second} is refused: {FIELD}")
        assert f"version {second} is incompatible with {first} during a rollout" in said
        assert "rollout: {incompatible: allow}" in said
        assert f"`pierhead scale {NAME} 0`" in said
        await until(lambda: FIELD in message(control))
        assert (state_of(control), stable(control)) == ("DEPLOY_FAILED", first)
        assert f"version {second} is refused, {first} runs: {FIELD}" in plan_words(controller.view, ())
        rejected = controller.view.services[0].rejected
        assert rejected is not None
        assert (rejected.version, rejected.is_refused) == (second, True)
        await asyncio.sleep(30)
        assert control.engine.done[made:] == []
        assert control.engine.read == [control.engine.images[ranker().image]], "replicas report the running one"
        assert takers(control) == {first}
        # To ask for it again changes nothing; the next version that can meet rolls out.
        before = controller.deployer.state(NAME).rejected
        await controller.commands.deploy([NAME])
        await until(lambda: controller.deployer.state(NAME).rejected not in (None, before))
        assert (stable(control), takers(control)) == (first, {first})
        await settled_at(control, build(control, ranker(), "3", GROWN))


async def test_a_field_with_a_default_rolls_out_and_back_again(control: Control) -> None:
    async with control.running() as controller:
        first = version(control, ranker())
        await settled_at(control, first)
        await settled_at(control, build(control, ranker(), "2", GROWN))
        assert build(control, ranker(), "1", USUAL) == first
        await settled_at(control, first)  # as the files say
        await settled_at(control, build(control, ranker(), "2", GROWN))
        assert await controller.commands.roll_back(NAME, None)
        await settled_at(control, first)
        assert control.said("refused") == []


async def test_without_a_contract_in_the_image_the_first_replica_is_compared_before_it_serves(control: Control) -> None:
    rules = replace(QUICK, auto_rollback=False)
    control.source.edit(ranker(rollout=rules))
    async with control.running() as controller:
        first = version(control, ranker())
        await settled_at(control, first)
        second = build(control, ranker(), "2", told=SHRUNK)
        async with never_both(control, first, second):
            await until(lambda: control.said("rolled_back"), 20.0)
            assert FIELD in control.said("rollback")[0]
            assert control.said("refused") == []
            await control.settled(NAME, 2)
            await asyncio.sleep(60)
        made = [one for one in control.engine.done if isinstance(one, CreateContainer) and one.version == second]
        assert len(made) == 1, "it is not tried again"
        assert (state_of(control), stable(control)) == ("DEPLOY_FAILED", first)
        assert FIELD in message(control)
        await settled_at(control, build(control, ranker(), "3", told=GROWN))
        assert controller.deployer.state(NAME).rejected is None


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_gap_lets_it_follow_and_it_may_be_allowed(control: Control, carried: bool, is_allowed: bool) -> None:
    async with control.running() as controller:
        first = version(control, ranker())
        await settled_at(control, first)
        second = build(control, ranker(), "2", *([SHRUNK] if carried else []), told=SHRUNK)
        async with contextlib.nullcontext() if is_allowed else never_both(control, first, second):
            await until(lambda: controller.deployer.state(NAME).rejected is not None and stable(control), 20.0)
            if is_allowed:
                control.source.edit(ranker(rollout=replace(QUICK, incompatible="allow")))
            else:
                controller.commands.scale(NAME, 0)
                await control.settled(NAME, 0)
                await until(lambda: stable(control) == second)
                controller.commands.scale(NAME, 2)
            await settled_at(control, second)
        assert controller.deployer.state(NAME).rejected is None


@pytest.mark.parametrize("carried", [True, False])
async def test_whenever_the_controller_dies_the_two_never_serve_together(control: Control, carried: bool) -> None:
    async with control.running():
        first = version(control, ranker())
        await settled_at(control, first)
    second = build(control, ranker(), "2", *([SHRUNK] if carried else []), told=SHRUNK)

    def is_over() -> bool:
        state = control.controller.deployer.state(NAME)
        return state.rejected is not None and state.rollout is None and control.row(NAME) == (2, 2, 2)

    lives, ended = 0, False
    while lives < 30 and not ended:
        lives += 1
        control.actions_to_live = 1
        async with control.running(), never_both(control, first, second):
            await until(is_over, within_s=20)
            ended = True
    assert ended
    assert carried or lives > 3, "every action was the last one of a controller"
    assert takers(control) == {first}


async def test_while_the_engine_is_away_no_replica_serves_that_was_not_compared(control: Control) -> None:
    async with control.running():
        first = version(control, ranker())
        await settled_at(control, first)
        second = build(control, ranker(), "2", told=SHRUNK)
        control.engine.behaviours[second] = Behaviour(ready_after_s=5.0)
        async with never_both(control, first, second):
            await until(lambda: any(one.version == second and one.ip for one in control.engine.containers.values()))
            control.engine.go_away()
            await asyncio.sleep(20)
            control.engine.come_back()
            await until(lambda: control.said("rolled_back"), 20.0)


async def test_an_image_that_cannot_be_read_counts_as_one_without_a_contract(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(image: str, path: str, project: str) -> bytes | None:
        raise EngineError("no space left on device (test)")

    async with control.running():
        first = version(control, ranker())
        await settled_at(control, first)
        monkeypatch.setattr(type(control.engine), "file_of_image", staticmethod(fails))
        second = build(control, ranker(), "2", GROWN)
        await settled_at(control, second)


async def test_a_return_to_a_version_that_cannot_meet_the_running_one_is_refused(control: Control) -> None:
    allow = ranker(rollout=replace(QUICK, incompatible="allow"))
    control.source.edit(allow)
    async with control.running() as controller:
        first = version(control, ranker())
        await settled_at(control, first)
        second = build(control, ranker(), "2", SHRUNK)
        await settled_at(control, second)
        control.source.edit(ranker())
        await until(lambda: controller.view.desired and controller.view.desired.services[NAME].rollout != allow.rollout)
        async with never_both(control, first, second):
            with contextlib.suppress(InvalidRequest):
                await controller.commands.roll_back(NAME, None)
            await until(lambda: FIELD in " ".join(control.said("rolled_back")))
        assert stable(control) == second


@pytest.mark.parametrize("told", [b"", b"\xff\xff"], ids=["none", "not one"])
async def test_a_version_without_a_contract_rolls_out(control: Control, told: bytes) -> None:
    """As a program that is no service of a class any more: nothing is known of it."""
    async with control.running():
        await settled_at(control, version(control, ranker()))
        second = build(control, ranker(), "2")
        control.contracts[second] = told
        await settled_at(control, second)


@pytest.mark.parametrize(
    ("parameters", "are_watched"), [(USUAL, False), (USUAL, True), (f"{USUAL}, limit: int = 1", False)]
)
async def test_services_of_one_image_change_at_once(tmp_path: Path, parameters: str, are_watched: bool) -> None:
    """By `deploy --now`, where the contract stays: in any other case the callee goes first."""
    callee, caller = ranker(image="image/app"), service("web", image="image/app", rollout=QUICK, callees=(NAME,))
    control = Control.of(tmp_path, callee, caller)
    build(control, callee, "1", USUAL)
    async with control.running() as controller:
        await settled_at(control, version(control, callee), of=2 * callee.replicas)
        build(control, callee, "2", parameters)
        made = len(control.engine.done)
        await controller.commands.deploy([NAME, "web"], is_watched=are_watched)
        await until(lambda: stable(control) == version(control, callee) and stable(control, "web"), 20.0)
        await settled_at(control, version(control, caller), of=2 * callee.replicas)
        created = [action.service for action in control.engine.done[made:] if isinstance(action, CreateContainer)]
        at_once = parameters == USUAL and not are_watched
        assert (created[:2] != [NAME, NAME]) is at_once, created
