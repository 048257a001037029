"""The executor: order, failure, overlap. The retry gate: how often what fails is tried."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.daemon.apply import PARALLEL_ACTIONS, Executor, RetryGate
from controller.errors import EngineError
from controller.model.actions import (
    Action,
    BeginRetirement,
    CreateContainer,
    DeleteServer,
    PullImage,
    RemoveContainer,
    SetServerState,
    SignalContainer,
    StartContainer,
)
from controller.model.plan import Outcome, Plan, Step
from controller.model.world import ServerState
from tests.unit.controller.control import until
from tests.unit.controller.worlds import service


def create(target: str) -> CreateContainer:
    return CreateContainer(target=target, service="web", version="v", number=1, spec=service("web"), cause="test")


def start(target: str) -> StartContainer:
    return StartContainer(target=target, service="web", cause="test")


def pull(target: str) -> PullImage:
    return PullImage(target=target, service=target, image="i", spec=service("s"), cause="test")


def sigterm(target: str) -> SignalContainer:
    return SignalContainer(target=target, service="web", container_id=f"id-{target}", signal="SIGTERM", cause="test")


def remove(target: str) -> RemoveContainer:
    return RemoveContainer(target=target, service="web", container_id=f"id-{target}", cause="test")


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


def steps(*actions: Action) -> Plan:
    return Plan(tuple(Step(number, action) for number, action in enumerate(actions, start=1)))


async def test_dependents_follow_and_the_rest_runs_in_parallel() -> None:
    world = World()
    world.held = {"a"}
    plan = Plan((Step(1, create("a")), Step(2, start("a"), (1,)), Step(3, create("b")), Step(4, start("b"), (3,))))
    async with world.executor() as executor:
        executor.submit(plan)
        await until(lambda: len(world.ended) == 2)
        assert world.began == [create("a"), create("b"), start("b")]
        assert executor.in_progress == (create("a"), start("a"))
        world.released.set()
        await until(lambda: not executor.in_progress)
    assert world.began[3:] == [start("a")]
    assert all(outcome.error is None for outcome in world.ended)


@pytest.mark.parametrize("error", [EngineError("no space left"), KeyError("no space left")], ids=["refused", "defect"])
async def test_a_failure_skips_its_dependents_only(error: Exception) -> None:
    world = World()
    world.errors["a"] = error
    plan = Plan((Step(1, create("a")), Step(2, start("a"), (1,)), Step(3, start("c"), (2,)), Step(4, create("b"))))
    async with world.executor() as executor:
        executor.submit(plan)
        await until(lambda: not executor.in_progress)
    assert world.began == [create("a"), create("b")]
    messages = {outcome.action.target: outcome.message for outcome in world.ended}
    assert "no space left" in messages.pop("a")
    assert messages == {"b": ""}


async def test_a_failed_action_is_retried_after_its_pause_and_not_before() -> None:
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
    assert world.began[-2:] == [create("a"), start("a")]


async def test_an_action_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.daemon.apply.TIMEOUT_S", {CreateContainer: 0.02})
    world = World()
    world.held = {"a"}
    async with world.executor() as executor:
        executor.submit(steps(create("a")))
        await until(lambda: not executor.in_progress)
    assert world.ended[0].message == "no end within 0.02 s"


@pytest.mark.parametrize(
    ("slow", "quick"),
    [
        (
            [pull(f"s{n}") for n in range(20)],
            [create(f"r{n}") for n in range(30)],
        ),
        ([start(f"s{n}") for n in range(20)], [sigterm("a"), remove("b")]),
        ([create(f"s{n}") for n in range(20)], [sigterm("a"), remove("b")]),
        (
            [start(f"s{n}") for n in range(20)],
            [
                SetServerState(target="a", backend="svc_web", state=ServerState.MAINT),
                BeginRetirement(target="a", container_id="c"),
            ],
        ),
    ],
    ids=["pulls", "starts and stops", "creations and stops", "a slow engine"],
)
async def test_slow_actions_do_not_hold_up_what_needs_another(slow: list[Action], quick: list[Action]) -> None:
    world = World()
    world.held = {action.target for action in slow}
    async with world.executor() as executor:
        executor.submit(steps(*slow, *quick))
        await until(lambda: len(world.ended) == len(quick))
        assert world.most_at_once <= PARALLEL_ACTIONS + 2
        world.released.set()
        await until(lambda: not executor.in_progress)


@pytest.mark.parametrize("make", [create, start, pull, sigterm, remove])
async def test_an_action_that_the_newest_plan_does_not_hold_is_not_begun(make: Callable[[str], Action]) -> None:
    world = World()
    actions = [make(f"r{number:02}") for number in range(60)]
    world.held = {action.target for action in actions}
    async with world.executor() as executor:
        executor.submit(steps(*actions))
        await until(lambda: world.began)
        begun = list(world.began)
        assert executor.in_progress == tuple(begun), "those that wait for a place can still be taken back"
        executor.submit(steps(actions[-1]))
        world.released.set()
        await until(lambda: actions[-1] in world.began)
        await until(lambda: not executor.in_progress)
    assert world.began == [*begun, actions[-1]]


async def test_what_has_been_begun_is_completed_and_what_waits_is_as_the_newest_plan_says() -> None:
    world = World()
    world.held = {"a", "b"}
    chain = Plan(
        (
            Step(1, DeleteServer(target="a", backend="svc_web")),
            Step(2, remove("a"), (1,)),
            Step(3, create("a"), (2,)),
            Step(4, start("a"), (3,)),
        )
    )
    ahead = [create(f"r{number}") for number in range(PARALLEL_ACTIONS)]
    world.held |= {action.target for action in ahead}
    waiting = Plan((Step(1, create("z")), Step(2, start("z"), (1,))))
    async with world.executor() as executor:
        executor.submit(chain)
        executor.submit(steps(*ahead))
        executor.submit(waiting)
        for plan in (waiting, Plan()):
            await until(lambda: {action.target for action in executor.in_progress} == {"a", *(r.target for r in ahead)})
            executor.submit(plan)
        world.released.set()
        await until(lambda: not executor.in_progress)
    assert [action for action in world.began if action.target == "a"] == [step.action for step in chain.steps]
    assert [action for action in world.began if action.target == "z"] == []


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


def test_the_gate_forgets_actions_that_are_not_planned_any_more() -> None:
    gate = RetryGate()
    gate.note(Outcome(create("a"), 0.0, EngineError("no")), 0.0)
    gate.keep_only([], 0.1)
    assert gate.refusals(), "its wait is not over: a plan in between may just not have needed it"
    gate.keep_only([create("a")], 1.0)
    assert gate.refusals()
    gate.keep_only([], 1.0)
    assert gate.refusals() == ()
