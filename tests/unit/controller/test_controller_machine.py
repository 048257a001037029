"""The whole controller against chance: engine, HAProxy and replicas in memory, hours in seconds of virtual time.

Replicas die, hang, run out of memory; calls fail; engine and HAProxy go away and come back; people scale, deploy good
and bad versions, roll back and change their mind; the controller is killed between any two actions and started again.
Whatever happens: no bad version ever gets traffic, no two versions with incompatible contracts get it, no GPU has two
owners, no version gets another one's user_config.
When the trouble ends, the world is what was asked for, and nothing is to do.

PIERHEAD_TEST_EXAMPLES=1000 --hypothesis-profile=chance makes the long run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pierhead.classes.compare import IMAGE_PATH

from controller.errors import ControllerError, EngineError, EngineUnreachable, RoutingError, UnknownService
from controller.model.actions import AddServer, CreateContainer, RemoveContainer, SignalContainer, StartContainer
from controller.model.machine import Machine
from controller.model.nodes import Availability
from controller.model.spec import NO_USER_CONFIG, AutoscaleSpec, GpuRequest, RolloutSpec, ServiceSpec, backend_name
from controller.model.world import ServerState, current_version
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.fakes.fake_swarm_configs import FakeSwarm, Fault
from tests.fakes.fake_swarm_engine import FakeSwarmEngine
from tests.harness.applications import contract
from tests.harness.virtual_time import VirtualLoop
from tests.unit.controller.control import Control
from tests.unit.controller.worlds import gpu_service, gpus, service

T = TypeVar("T")

EXAMPLES = int(os.environ.get("PIERHEAD_TEST_EXAMPLES", "25"))
STEPS = 40
PHASES = tuple(phase for phase in Phase if "PIERHEAD_TEST_SHRINK" in os.environ or phase is not Phase.shrink)
"""A failure is reported unchanged; PIERHEAD_TEST_SHRINK=1 searches for a shorter one, for minutes."""
GPUS = 3
SETTLE_S = 1800.0
"""Virtual seconds within which everything must be as wanted, once the trouble is over."""
NEVER_S = 1e9
UNSEEN_S = 100.0
"""What was planned for a world before this time has been done, however slow all answers are."""
SLOWEST_S = 8.0
"""Longest time that the engine or HAProxy takes to answer."""
BAD = {
    "crashes": Behaviour(ready_after_s=NEVER_S, exits_after_s=0.5, exit_code=1, output="no such model\n"),
    "never ready": Behaviour(ready_after_s=NEVER_S),
    "cannot start": Behaviour(start_error="exec: not found"),
    "out of memory": Behaviour(ready_after_s=NEVER_S, exits_after_s=1.0, oom=True),
}
SERVICES = ("web", "ranker", "batch")
ON_GPUS = ("ranker", "batch")

NODES = ("n1", "n2", "n3")
GPUS_OF_A_NODE = 2
LOSSES = st.sampled_from([0.3, 5.0, 12.0, 20.0, 60.0])
"""Seconds: before the probes notice, before Swarm does, and after."""
WELL_S = 120.0
"""A replica that has been ready for so long is well: what the controller sees is never as old."""

names = st.sampled_from(SERVICES)
picks = st.integers(0, 20)


@dataclass
class Timed(Control):
    """A control whose clocks are those of the virtual loop."""

    def wall(self) -> float:
        return self.clock() + self.engine.clock_set_by_s


class ControllerMachine(RuleBasedStateMachine):
    """Rules are what happens to a stack; the controller runs between them."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory(prefix="pierhead-machine-")
        self._loop = VirtualLoop()
        rollout = RolloutSpec(bake_s=5.0)
        self.specs: dict[str, ServiceSpec] = {
            "web": service("web", startup_deadline_s=30.0, rollout=rollout),
            "ranker": gpu_service("ranker", startup_deadline_s=30.0, rollout=rollout),
            "batch": gpu_service("batch", startup_deadline_s=30.0, rollout=rollout, replicas=0),
        }
        self.bad: set[str] = set()
        """Versions that never work."""
        self.written_with: dict[str, set[str]] = {}
        """By version: every user_config that was written with it."""
        self.gpu_counts: dict[str, int] = {}
        """By version: how many GPUs a replica asks for, where it is not 1."""
        self.contracts: dict[str, int] = {}
        """By version: the number of its contract. Versions of one number can meet, those of two cannot."""
        self.removed: set[str] = set()
        """Services that the compose files do not have now."""
        self._count = 0
        self.control = Timed.of(Path(self._directory.name), *self.specs.values(), engine=self.engine())
        self.control.clock = self._clock
        self._life: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    def engine(self) -> FakeEngine:
        return FakeEngine(self._clock, gpus=gpus(GPUS))

    def _clock(self) -> float:
        return 1_700_000_000.0 + self._loop.time()

    # -------------------------------------------------------------------------------------------------- the controller

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    @initialize()
    def first_start(self) -> None:
        self.start()
        self.run(self.until(self.all_settled, "the first start"))

    def start(self) -> None:
        async def begin() -> None:
            self._end = asyncio.Event()
            begun = asyncio.Event()

            async def live() -> None:
                try:
                    async with self.control.running():
                        begun.set()
                        await self._end.wait()
                except* EngineUnreachable:
                    pass  # it ends by itself, for Docker to start it again

            self._life = asyncio.create_task(live())
            await begun.wait()

        self.run(begin())

    def kill(self) -> None:
        """It stops between two steps of the event loop."""

        async def end() -> None:
            self._end.set()
            assert self._life is not None
            await self._life

        self.run(end())
        self._life = None

    def revive(self) -> None:
        """Start it again where it has died of an action, or is about to."""
        if self._life is not None and self.control.actions_to_live == 0:
            self.run(asyncio.wait([self._life]))
        if self._life is None or self._life.done():
            self.control.actions_to_live = None
            self.start()

    async def until(self, look: Callable[[], object], what: str, within_s: float = SETTLE_S) -> None:
        end = self._loop.time() + within_s
        while not look():
            if self._loop.time() > end:
                raise AssertionError(f"not within {within_s:g} s: {what}\n{self.explained()}")
            await asyncio.sleep(0.5)

    def explained(self) -> str:
        controller = self.control.controller
        rows = [f"{row.name}: {row.ready} of {row.wanted}: {row.message}" for row in controller.view.services]
        states = [f"{name}: {controller.deployer.state(name)}" for name in SERVICES]
        events = [stored.event.message for stored in controller.events.select(limit=40)]
        return "\n".join([*rows, *states, f"bad are {sorted(self.bad)}", str(controller.view.plan), *events])

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 5.0, 20.0, 90.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))
        self.revive()

    @rule()
    def controller_is_killed(self) -> None:
        self.kill()
        self.start()

    @rule(actions=st.integers(1, 6), seconds=st.sampled_from([0.2, 2.0, 30.0]))
    def controller_dies_of_an_action(self, actions: int, seconds: float) -> None:
        self.control.actions_to_live = actions
        self.run(asyncio.sleep(seconds))
        self.revive()

    # -------------------------------------------------------------------------------------------------- what people do

    @rule(name=names, replicas=st.integers(0, 4))
    def scale(self, name: str, replicas: int) -> None:
        with contextlib.suppress(UnknownService):
            self.control.controller.commands.scale(name, replicas)

    @rule(name=names, what=st.sampled_from(["good", "good", *BAD]))
    def deploy(self, name: str, what: str) -> None:
        self._count += 1
        self.edit(name, definition_hash=f"m{self._count}")
        version, gpu = self.version(name), self.specs[name].gpu
        self.gpu_counts[version] = gpu.count if gpu else 0
        if what != "good":
            self.bad.add(version)
            self.control.engine.behaviours[version] = BAD[what]

    @rule(name=names, is_other=st.booleans(), is_carried=st.booleans())
    def change_contract(self, name: str, is_other: bool, is_carried: bool) -> None:
        """Build an image; its replicas tell a contract, and it may carry that, too."""
        self._count += 1
        number = max([*self.contracts.values(), 0]) + is_other
        parameters = f"of{number}: int, more{self._count}: int = 0"
        image = self.control.engine.add_image(self.specs[name].image, f"m{self._count}")
        read = self.control.controller.specs.current
        if read is not None and name in read.services:  # it may take the image before it reads the files again
            self.expect_config(read.services[name])
        if is_carried:
            self.control.engine.files[image] = {IMAGE_PATH: contract(parameters, ranker=name.capitalize())}
        self.edit(name)
        version, gpu = self.version(name), self.specs[name].gpu
        self.gpu_counts[version] = gpu.count if gpu else 0
        self.contracts[version] = number
        self.control.contracts[version] = contract(parameters, name, ranker=name.capitalize())

    @rule(name=names, number=st.integers(0, 3))
    def configure(self, name: str, number: int) -> None:
        self.edit(name, user_config=f'{{"number":{number}}}' if number else NO_USER_CONFIG)

    @rule(name=st.sampled_from(ON_GPUS), count=st.integers(1, 3))
    def ask_for_gpus(self, name: str, count: int) -> None:
        self._count += 1
        self.edit(name, gpu=GpuRequest(count=count), definition_hash=f"m{self._count}")
        self.gpu_counts[self.version(name)] = count

    @rule(name=names, pace=st.sampled_from([(1, 0), (2, 0), (0, 1), (1, 1)]), weight=st.sampled_from([None, 20]))
    def change_pace(self, name: str, pace: tuple[int, int], weight: int | None) -> None:
        self.edit(name, rollout=RolloutSpec(*pace, bake_s=5.0, canary_weight=weight))

    @rule(name=names, bounds=st.sampled_from([None, (1, 3), (0, 2), (2, 4)]))
    def change_scaling(self, name: str, bounds: tuple[int, int] | None) -> None:
        quick = AutoscaleSpec(look_back_period_s=3.0, upscale_delay_s=1.0, downscale_delay_s=5.0)
        self.edit(name, autoscale=replace(quick, min=bounds[0], max=bounds[1]) if bounds else None)

    @rule(name=names, most=st.sampled_from([None, 1, 2]))
    def change_bound(self, name: str, most: int | None) -> None:
        self.edit(name, max_replicas_per_node=most)

    @rule(name=names)
    def remove_or_bring_back(self, name: str) -> None:
        self.removed ^= {name}
        self.edit(name)

    def edit(self, name: str, **changes: Any) -> None:
        """Write other compose files."""
        self.specs[name] = replace(self.specs[name], **changes)
        if name not in self.removed:
            self.expect_config(self.specs[name])
        self.control.source.edit(*(spec for spec in self.specs.values() if spec.name not in self.removed))

    def expect_config(self, spec: ServiceSpec) -> None:
        """A version of these files and the image of now may have this user_config."""
        found = current_version(spec, self.control.engine.images)
        self.written_with.setdefault(found or "", {NO_USER_CONFIG}).add(spec.user_config)

    @rule(name=names, ask=st.sampled_from(["roll_back", "abort", "promote", "deploy"]))
    def change_mind(self, name: str, ask: str) -> None:
        commands = self.control.controller.commands
        with contextlib.suppress(ControllerError):
            if ask == "roll_back":
                self.run(commands.roll_back(name, None))
            elif ask == "deploy":
                self.run(commands.deploy([name]))
            else:
                getattr(commands, ask)(name)

    @rule(name=names, requests=st.integers(0, 6))
    def work(self, name: str, requests: int) -> None:
        self.control.work[name] = requests

    # ------------------------------------------------------------------------------------------------- what goes wrong

    @rule(pick=picks, what=st.sampled_from(["crash", "kill", "run_out_of_memory", "hang", "lose_network", "delete"]))
    def replica_trouble(self, pick: int, what: str) -> None:
        up = [name for name in self.control.engine.names() if self.control.engine.by_name(name).state.is_up]
        if up:
            getattr(self.control.engine, what)(up[pick % len(up)])
            if what in ("hang", "lose_network"):
                name = up[pick % len(up)]
                self.control.router.mark_down(name, until=lambda: self.control.engine.readiness(name) == "ready")

    @rule(kind=st.sampled_from([CreateContainer, StartContainer, SignalContainer, RemoveContainer]))
    def engine_call_fails(self, kind: type[Any]) -> None:
        self.control.engine.fail_next(kind, EngineError("something is wrong (test)"))

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def engine_goes_away(self, seconds: float) -> None:
        self.control.engine.go_away()
        self.run(asyncio.sleep(seconds))
        self.control.engine.come_back()
        self.revive()

    @rule(seconds=st.sampled_from([0.0, 0.2, 0.2, 1.0, 4.0, SLOWEST_S]))
    def engine_is_slow_to_answer(self, seconds: float) -> None:
        self.control.engine.reading_s = seconds

    @rule(seconds=st.sampled_from([5.0, 60.0]), is_busy=st.booleans())
    def machine_has_no_memory_or_no_time(self, seconds: float, is_busy: bool) -> None:
        """Nothing more is started for want of memory; a missing replica is, one at a time, for want of time."""
        gib = 1024**3
        self.control.engine.machine = Machine(2, 8 * gib, 8 * gib if is_busy else 0, 32768, 500, load=50.0 * is_busy)
        self.run(asyncio.sleep(UNSEEN_S))
        done = len(self.control.engine.done)
        self.run(asyncio.sleep(seconds))
        starts = [one for one in self.control.engine.done[done:] if isinstance(one, CreateContainer)]
        assert is_busy or not starts, f"{starts}\n{self.explained()}"
        self.control.engine.machine = None
        self.revive()

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, SLOWEST_S]))
    def engine_is_slow_to_start(self, seconds: float) -> None:
        self.control.engine.starting_s = seconds

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def haproxy_goes_away(self, seconds: float) -> None:
        self.control.router.up = False
        self.run(asyncio.sleep(seconds))
        self.control.router.up = True
        self.control.router.restart()
        self.revive()

    @rule(seconds=st.sampled_from([0.0, 0.2, 0.2, 1.0, 4.0, SLOWEST_S]))
    def haproxy_is_slow_to_answer(self, seconds: float) -> None:
        self.control.router.reading_s = seconds

    @rule(action=st.sampled_from([AddServer]), seconds=st.sampled_from([1.0, 10.0]))
    def haproxy_refuses(self, action: type[Any], seconds: float) -> None:
        self.control.router.failing[action] = RoutingError("no (test)")
        self.run(asyncio.sleep(seconds))
        del self.control.router.failing[action]
        self.revive()

    @rule(by_s=st.sampled_from([-3600.0, -5.0, 5.0, 3600.0]))
    def clock_is_set(self, by_s: float) -> None:
        self.control.set_clock(by_s)

    # ------------------------------------------------------------------------------------------- what must always hold

    @invariant()
    def no_bad_version_gets_traffic(self) -> None:
        for _, name in self.control.router.servers:
            assert name.rsplit("-", 2)[1] not in self.bad, f"{name} gets traffic and never worked"

    @invariant()
    def no_two_versions_get_traffic_whose_contracts_cannot_meet(self) -> None:
        for name in SERVICES:
            found = self.control.view.endpoints.get(name)
            versions = {one.version for one in (found.endpoints if found else ()) if one.state == one.READY}
            versions |= {
                server.name.rsplit("-", 2)[1]
                for server in self.control.router.servers.values()
                if server.backend == backend_name(name) and server.up and server.state is ServerState.READY
            }
            numbers = {self.contracts[version] for version in versions if version in self.contracts}
            assert len(numbers) <= 1, f"{versions} of {name} meet\n{self.explained()}"

    @invariant()
    def no_version_gets_the_user_config_of_another(self) -> None:
        for one in self.control.engine.containers.values():
            assert one.user_config in self.written_with.get(one.version, {NO_USER_CONFIG}), one.name

    @invariant()
    def no_gpu_has_two_owners(self) -> None:
        owners = [gpu for one in self.control.engine.containers.values() for gpu in one.gpus]
        assert len(owners) == len(set(owners)), owners

    @invariant()
    def not_more_than_wanted_and_a_surge(self) -> None:
        for name, spec in self.specs.items():
            marked = self.control.store.retirements
            staying = [
                one
                for one in self.control.engine.containers.values()
                if one.service == name and one.id not in marked and one.state.is_up
            ]
            most = 4 + max(1, spec.rollout.max_surge) + 1
            assert len(staying) <= most, f"{[one.name for one in staying]}\n{self.explained()}"

    # --------------------------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        try:
            if self._life is not None:
                self.settle()
        finally:
            if self._life is not None and not self._life.done():
                self.kill()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._directory.cleanup()

    def settle(self) -> None:
        """The trouble is over; everything becomes as wanted."""
        self.control.work.clear()
        self.control.engine.fail_no_more()
        self.control.engine.reading_s = self.control.router.reading_s = self.control.engine.starting_s = 0.0
        self.run(asyncio.sleep(SLOWEST_S))  # an answer may be under way
        self.revive()  # it may have been about to end: of an action, or because the engine was away too long
        self.control.actions_to_live = None
        for uuid in list(self.control.store.gpu_faults):
            self.control.controller.commands.unmark_gpu(uuid)
        with contextlib.suppress(UnknownService):
            self.control.controller.commands.scale("batch", 0)  # it may hold what the way back of the other one needs
        for name in SERVICES:
            # A rollout of one replica under a bound of one would wait; so would one that needs the last one's GPU.
            pace = replace(self.specs[name].rollout, max_unavailable=1)
            self.edit(name, max_replicas_per_node=None, rollout=pace)
            if self.control.controller.deployer.state(name).stable is None and self.version(name) in self.bad:
                self.deploy(name, "good")  # nothing ever worked: only another version can
        self.run(asyncio.sleep(3.0))  # what is shown now may be from before the last trouble
        self.run(self.until(self.all_settled, "everything is as wanted"))
        for name in SERVICES:
            versions = {one.version for one in self.control.engine.containers.values() if one.service == name}
            assert len(versions) <= 1
            assert not versions & self.bad, self.explained()
        for one in self.control.engine.containers.values():
            text = self.control.user_configs.get(one.id, NO_USER_CONFIG)
            assert text in self.written_with.get(one.version, {NO_USER_CONFIG}), one.name
            if one.version == self.version(one.service):
                assert text == self.specs[one.service].user_config, f"{one.name}\n{self.explained()}"
        routed = {one.name for one in self.control.engine.containers.values() if one.service == "web"}
        assert {name for _, name in self.control.router.servers} == routed
        is_off = "web" not in self.removed and self.is_switched_off("web")
        assert self.control.router.closed == ({backend_name("web")} if is_off else set())
        assert self.control.store.retirements == {}

    def all_settled(self) -> bool:
        view = self.control.view
        assert self._life is not None
        assert not self._life.done(), "the controller has ended"
        if view.desired is None:
            return False
        fits = {name: self.fitting(name) for name in SERVICES if name not in self.removed}
        counts = {row.name: (row.ready, sum(bool(one.name) for one in row.replicas)) for row in view.services}
        at_rest = all(self.control.controller.deployer.state(name).rollout is None for name in SERVICES)
        return at_rest and not view.plan.steps and counts == {name: (count, count) for name, count in fits.items()}

    def fitting(self, name: str) -> int:
        """How many replicas there are when everything is as wanted. The other one on GPUs has none then."""
        wanted, running = self.wanted(name), self.control.controller.deployer.state(name).stable
        each = self.gpu_counts.get(running or "", 1)
        return min(wanted, self.most(each)) if name in ON_GPUS and each else wanted

    def most(self, each: int) -> int:
        """How many replicas with so many GPUs each there can be."""
        return GPUS // each

    def is_switched_off(self, name: str) -> bool:
        """Whether it shall have no replica, whatever the load."""
        return self.wanted(name) == 0 and (self.specs[name].autoscale is None or name in self.control.store.overrides)

    def wanted(self, name: str) -> int:
        override, spec = self.control.store.overrides.get(name), self.specs[name]
        if override is not None:
            return override.replicas
        return spec.autoscale.min if spec.autoscale else spec.replicas  # there is no load any more

    def version(self, name: str) -> str:
        found = current_version(self.specs[name], self.control.engine.images)
        assert found is not None
        return found


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Thousands of events a second are not what a log is for."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


class StateInSwarm(ControllerMachine):
    """The same with the state in Swarm's configs, which are away at times: a killed controller loses what it observed
    in its last seconds, and the next one waits for its lease."""

    def __init__(self) -> None:
        super().__init__()
        self.swarm = self.control.swarm = FakeSwarm()

    @rule(fault=st.sampled_from(["", "lost", "answer lost"]), seconds=st.sampled_from([0.3, 3.0, 30.0]))
    def swarm_loses_writes(self, fault: Fault, seconds: float) -> None:
        self.swarm.fault = lambda: fault
        self.run(asyncio.sleep(seconds))
        self.swarm.fault = lambda: ""
        self.revive()
        self.run(self.until(lambda: not self.control.store.trouble, "the state is written again", 60.0))


class OnNodes(ControllerMachine):
    """The same on a Swarm: the engine chooses nodes, and nodes are lost, cut off, drained, doubted, and come back."""

    @property
    def swarm(self) -> FakeSwarmEngine:
        found = self.control.engine
        assert isinstance(found, FakeSwarmEngine)
        return found

    def engine(self) -> FakeEngine:
        made = FakeSwarmEngine(self._clock)
        for name in NODES:
            made.add_node(name, GPUS_OF_A_NODE)
        return made

    @rule(name=st.sampled_from(ON_GPUS), count=st.integers(1, GPUS_OF_A_NODE))
    def ask_for_gpus(self, name: str, count: int) -> None:
        self._count += 1
        self.edit(name, gpu=GpuRequest(count=count), definition_hash=f"m{self._count}")
        self.gpu_counts[self.version(name)] = count

    @rule(lost=st.sets(st.sampled_from(NODES), min_size=1, max_size=2), is_cut=st.booleans(), seconds=LOSSES)
    def nodes_are_lost(self, lost: set[str], is_cut: bool, seconds: float) -> None:
        for name in lost:
            (self.swarm.cut_off if is_cut else self.swarm.power_off)(name)
        self.run(asyncio.sleep(seconds))
        self.revive()

    @rule(name=st.sampled_from(NODES))
    def node_comes_back(self, name: str) -> None:
        self.swarm.power_on(name)

    @rule(name=st.sampled_from(NODES), availability=st.sampled_from(["active", "pause", "drain"]))
    def node_is_made_available(self, name: str, availability: Availability) -> None:
        """`docker node update`, and not `pierhead node`."""
        self.swarm.set_availability(name, availability)

    @rule(name=st.sampled_from(NODES), ask=st.sampled_from(["drain", "drain", "force", "activate"]))
    def node_is_to_leave(self, name: str, ask: str) -> None:
        """`pierhead node`."""
        nodes = self.control.controller.commands.nodes
        with contextlib.suppress(ControllerError):
            self.run(nodes.activate(name) if ask == "activate" else nodes.drain(name, at_once=ask == "force"))

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]), unsure_s=st.sampled_from([0.3, 2.0, 20.0]))
    def leader_is_lost(self, seconds: float, unsure_s: float) -> None:
        """Another manager leads, and has not heard of the nodes yet; the controller begins there."""
        self.kill()
        self.swarm.go_away()
        self.run(asyncio.sleep(seconds))
        self.doubt(NODES)
        self.swarm.come_back()
        self.start()
        self.run(asyncio.sleep(unsure_s))
        self.trust()
        self.revive()

    def doubt(self, names: Iterable[str]) -> None:
        """A new leader has not heard of these nodes yet."""
        for name in names:
            if self.swarm.nodes[name].state == "ready":
                self.swarm.set_state(name, "unknown")

    def trust(self) -> None:
        for name, node in self.swarm.nodes.items():
            if node.state == "unknown":
                self.swarm.set_state(name, "ready")

    @rule(
        names=st.sets(st.sampled_from(NODES), min_size=1),
        is_cut=st.booleans(),
        seconds=st.sampled_from([0.5, 5.0, 60.0, 600.0]),
    )
    def what_is_not_known_of_nodes_is_no_reason_to_act(self, names: set[str], is_cut: bool, seconds: float) -> None:
        """Managers do not hear of some nodes, or the overlay network loses what goes to them: all runs well there."""
        self.settle()
        done = len(self.swarm.done)
        there = {one.name for one in self.swarm.containers.values() if one.node in names}
        if is_cut:
            self.control.silent |= there
            self.control.router.away = frozenset(names)
            for name in there:
                self.control.router.mark_down(name, until=lambda: not self.control.silent)
        else:
            self.doubt(names)
        self.run(asyncio.sleep(seconds))
        assert self.swarm.done[done:] == [], self.explained()
        self.control.silent.clear()
        self.control.router.away = frozenset()
        self.trust()

    @invariant()
    def no_gpu_has_two_owners(self) -> None:
        """What waits for a node shows the GPUs that it was made for; it gets others."""
        owners = [gpu for one in self.swarm.containers.values() if one.state.is_up for gpu in one.gpus]
        assert len(owners) == len(set(owners)), owners

    @invariant()
    def nothing_that_has_been_well_for_long_is_retired_as_failed(self) -> None:
        for one in self.swarm.containers.values():
            mark = self.control.store.retirements.get(one.id)
            if mark is not None and mark.failed and one.started_at is not None:
                well_s = mark.draining_since - one.started_at
                is_well = well_s > WELL_S and self.swarm.readiness(one.name) == "ready"
                assert not is_well, f"{one.name}: {mark.cause}\n{self.explained()}"

    def settle(self) -> None:
        for name in NODES:
            self.swarm.power_on(name)
            self.swarm.set_availability(name, "active")
        super().settle()

    def most(self, each: int) -> int:
        return len(NODES) * (GPUS_OF_A_NODE // each)


@pytest.mark.timeout(240 + 2 * EXAMPLES)  # against what hangs; two cores with nothing else to do need a tenth
@pytest.mark.parametrize("machine", [ControllerMachine, StateInSwarm, OnNodes])
def test_the_controller_against_chance(machine: type[ControllerMachine]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
        ),
    )
