"""The executor: order, failure, overlap. The retry gate: how often what fails is tried."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.apply import PARALLEL_ACTIONS, Executor, RetryGate
from controller.errors import EngineError
from controller.model.actions import Action, BeginRetirement, CreateContainer, PullImage, SetServerState, StartContainer
from controller.model.plan import Outcome, Plan, Step
from controller.model.world import ServerState
from tests.unit.controller.control import until
from tests.unit.controller.worlds import service


def create(target: str) -> CreateContainer:
    return CreateContainer(target=target, service="web", version="v", number=1, spec=service("web"), cause="test")


def start(target: str) -> StartContainer:
    return StartContainer(target=target, service="web", cause="test")


class World:
    """Carries out actions when the test lets it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.began: list[Action] = []
        self.ended: list[Outcome] = []
        self.errors: dict[str, Exception] = {}
        self.held: set[str] = set()
        self.released = asyncio.Event()
        self.most_at_once = 0
        self._at_once = 0

    async def perform(self, action: Action) -> None:
        self.began.append(action)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if action.target in self.held:
                await self.released.wait()
            await asyncio.sleep(0)
            if action.target in self.errors:
                raise self.errors[action.target]
        finally:
            self._at_once -= 1

    @contextlib.asynccontextmanager
    async def executor(self) -> AsyncIterator[Executor]:
        async with asyncio.TaskGroup() as tasks:
            yield Executor(self.perform, self.ended.append, tasks.create_task, lambda: self.now)

    def targets(self) -> list[str]:
        return [action.target for action in self.began]


async def test_dependents_follow_and_the_rest_runs_beside() -> None:
    world = World()
    world.held = {"a"}
    plan = Plan((Step(1, create("a")), Step(2, start("a"), (1,)), Step(3, create("b")), Step(4, start("b"), (3,))))
    async with world.executor() as executor:
        executor.submit(plan)
        await until(lambda: len(world.ended) == 2)
        assert world.targets() == ["a", "b", "b"]
        assert executor.in_progress == (create("a"), start("a"))
        world.released.set()
        await until(lambda: not executor.in_progress)
    assert [type(action).__name__ for action in world.began if action.target == "a"] == [
        "CreateContainer",
        "StartContainer",
    ]
    assert all(outcome.error is None for outcome in world.ended)


async def test_a_failure_skips_its_dependents_only() -> None:
    world = World()
    world.errors["a"] = EngineError("no space left")
    steps = (Step(1, create("a")), Step(2, start("a"), (1,)), Step(3, start("c"), (2,)), Step(4, create("b")))
    async with world.executor() as executor:
        executor.submit(Plan(steps))
        await until(lambda: not executor.in_progress)
    assert sorted(world.targets()) == ["a", "b"]
    assert {outcome.action.target: outcome.message for outcome in world.ended} == {"a": "no space left", "b": ""}


async def test_what_failed_is_tried_again_after_its_pause_and_not_before() -> None:
    world = World()
    world.errors["a"] = EngineError("busy")
    plan = Plan((Step(1, create("a")), Step(2, start("a"), (1,))))
    async with world.executor() as executor:
        for now, tries in ((0.0, 1), (0.4, 1), (0.5, 2), (1.4, 2), (1.5, 3), (3.4, 3), (3.5, 4)):
            world.now = now
            executor.submit(plan)
            await until(lambda: not executor.in_progress)
            assert len(world.began) == tries, now
        world.errors.clear()
        world.now = 100.0
        executor.submit(plan)
        await until(lambda: not executor.in_progress)
        assert executor.gate.refusals() == ()
    assert world.targets()[-2:] == ["a", "a"]


async def test_an_unexpected_exception_is_a_failure_and_ends_nothing() -> None:
    world = World()
    world.errors["a"] = KeyError("internal")
    async with world.executor() as executor:
        executor.submit(Plan((Step(1, create("a")), Step(2, create("b")))))
        await until(lambda: not executor.in_progress)
    assert {outcome.action.target: bool(outcome.error) for outcome in world.ended} == {"a": True, "b": False}


async def test_an_action_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.apply.TIMEOUT_S", {CreateContainer: 0.02})
    world = World()
    world.held = {"a"}
    async with world.executor() as executor:
        executor.submit(Plan((Step(1, create("a")),)))
        await until(lambda: not executor.in_progress)
    assert world.ended[0].message == "no end within 0.02 s"


async def test_pulls_do_not_take_the_places_of_others() -> None:
    world = World()
    world.held = {f"pull{index}" for index in range(20)}
    pulls = [PullImage(target=target, service=target, image="i", spec=service(target)) for target in sorted(world.held)]
    others = [create(f"r{index}") for index in range(30)]
    steps = tuple(Step(number, action) for number, action in enumerate([*pulls, *others], start=1))
    async with world.executor() as executor:
        executor.submit(Plan(steps))
        await until(lambda: len(world.ended) == 30)
        assert world.most_at_once <= PARALLEL_ACTIONS + 2
        world.released.set()
        await until(lambda: not executor.in_progress)


async def test_the_end_of_the_owner_ends_everything() -> None:
    world = World()
    world.held = {"a"}
    with pytest.raises(ExceptionGroup):  # noqa: PT012 - the block is the owner
        async with world.executor() as executor:
            executor.submit(Plan((Step(1, create("a")), Step(2, start("a"), (1,)))))
            await until(lambda: world.began)
            raise RuntimeError("stop")
    assert executor.in_progress == ()
    assert world.ended == []


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=40))
def test_the_gate_waits_between_half_a_second_and_thirty(history: list[tuple[float, bool]]) -> None:
    gate, now, failures = RetryGate(), 0.0, 0
    for pause_s, succeeds in history:
        now += pause_s
        failures = 0 if succeeds else failures + 1
        gate.note(Outcome(create("a"), 0.0, None if succeeds else EngineError("no")), now)
        waited_s = gate.next_opening_s(now)
        if succeeds:
            assert waited_s is None
            assert gate.allows(create("a"), now)
        else:
            assert waited_s is not None
            assert waited_s == pytest.approx(min(30.0, 0.5 * 2 ** (failures - 1)))
            assert not gate.allows(create("a"), now)
            assert gate.allows(create("a"), now + waited_s + 1e-6)
        assert gate.allows(start("a"), now)
        assert gate.allows(create("b"), now)


def test_the_gate_forgets_what_nobody_plans_any_more() -> None:
    gate = RetryGate()
    gate.note(Outcome(create("a"), 0.0, EngineError("no")), 0.0)
    gate.keep_only([], 0.1)
    assert gate.refusals(), "its wait is not over: a plan in between may just not have needed it"
    gate.keep_only([create("a")], 1.0)
    assert gate.refusals()
    gate.keep_only([], 1.0)
    assert gate.refusals() == ()


async def test_a_slow_engine_keeps_nothing_waiting_that_does_not_go_to_it() -> None:
    world = World()
    world.held = {f"slow{index}" for index in range(20)}
    slow = [start(target) for target in sorted(world.held)]
    quick = [
        SetServerState(target="a", backend="svc_web", state=ServerState.MAINT),
        BeginRetirement(target="a", container_id="c"),
    ]
    async with world.executor() as executor:
        executor.submit(Plan(tuple(Step(number, action) for number, action in enumerate([*slow, *quick], start=1))))
        await until(lambda: len(world.ended) == 2)
        assert world.most_at_once <= PARALLEL_ACTIONS + len(quick)
        world.released.set()
        await until(lambda: not executor.in_progress)
