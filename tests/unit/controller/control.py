"""A controller on fakes, for tests: engine, HAProxy, compose files and replicas in memory, everything else real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from controller.daemon.alerts import AskRules
from controller.daemon.assembly import Controller, World, assemble
from controller.daemon.boundaries import Boundaries
from controller.daemon.callers import Gatekeeper
from controller.daemon.edge_calls import PLAIN, EdgeAddress
from controller.daemon.llm_replicas import operate
from controller.daemon.nodes import NoNodes
from controller.desired.measurements import Query
from controller.errors import PrometheusError, ReplicaError
from controller.files.acme import AcmeWatch
from controller.files.pem import PemWatch
from controller.model.reports import Event
from controller.model.spec import NO_USER_CONFIG, PrometheusPolicy, ServiceSpec, Spec, digest
from controller.model.world import SleepReport, UserConfigReport, current_version
from controller.observe.alertmanager import Silencer
from controller.observe.judge import ProbeReading
from controller.observe.prober import Subject
from controller.observe.prometheus import AlertRule, Series
from controller.observe.traces import AskTraces, no_traces
from controller.status.traffic import AskSeries
from controller.status.view import View
from controller.storage.file import StateFile
from controller.storage.store import StateStore
from controller.swarm.node_commands import SwarmNodeCommands
from controller.swarm.state.configs import SwarmDocument
from controller.swarm.state.holder import StateHolder
from tests.fakes.fake_engine import FakeContainer, FakeEngine
from tests.fakes.fake_router import FakeRouter
from tests.fakes.fake_swarm_configs import FakeConfigs, FakeSwarm
from tests.harness.virtual_time import VirtualLoop, wall_clock
from tests.harness.waiting import PATIENCE_S

PROJECT = "p"


async def until(look: Callable[[], object], within_s: float | None = None) -> None:
    """Return when `look` returns something true; fail after `within_s` seconds.

    Left out: 5 s of virtual time, which no machine makes longer, and PATIENCE_S of real time.
    """
    if within_s is None:
        within_s = 5.0 if isinstance(asyncio.get_running_loop(), VirtualLoop) else PATIENCE_S
    async with asyncio.timeout(within_s):
        while not look():  # noqa: ASYNC110 - the things that tests look at send no event
            await asyncio.sleep(0.005)


def version(control: Control, spec: ServiceSpec) -> str:
    """The version of these files with the image of now."""
    found = current_version(spec, control.engine.images)
    assert found is not None
    return found


async def no_prometheus(service: str, policy: PrometheusPolicy) -> float:
    raise PrometheusError(f"no Prometheus at {policy.url} (test)")


async def no_series(query: str, start: float, end: float, step_s: float) -> Sequence[Series]:
    raise PrometheusError("no connection to http://prometheus:9090 (test)")


async def no_rules() -> Sequence[AlertRule]:
    raise PrometheusError("no connection to http://prometheus:9090 (test)")


async def directly(call: Callable[[], int]) -> int:
    """Call an autoscaling function at once: threads do not go by virtual time."""
    return call()


@dataclass
class FakeSource:
    """Compose files in memory."""

    services: dict[str, ServiceSpec] = field(default_factory=dict)
    error: Exception | None = None
    edits: int = 0

    async def load(self) -> Spec:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return Spec(PROJECT, dict(self.services))

    async def fingerprint(self) -> Hashable:
        return self.edits

    def edit(self, *services: ServiceSpec, error: Exception | None = None) -> None:
        """Write other files."""
        self.services = {service.name: service for service in services}
        self.error = error
        self.edits += 1


class Died(BaseException):
    """As a killed process: nothing may catch it."""


class Mortal:
    """An engine or a router whose calls may be the controller's last."""

    def __init__(self, real: Any, control: Control) -> None:
        self._real = real
        self._control = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def perform(self, *arguments: Any) -> None:
        if self._control.actions_to_live == 0:
            raise Died
        await self._real.perform(*arguments)
        if self._control.actions_to_live is not None:
            self._control.actions_to_live -= 1
            if self._control.actions_to_live == 0:
                raise Died


@dataclass
class Control:
    """The running controller and the world around it."""

    directory: Path
    engine: FakeEngine
    router: FakeRouter
    source: FakeSource
    clock: Callable[[], float] = wall_clock
    engine_lost_s: float = 30.0
    silent: set[str] = field(default_factory=set)
    """Names of replicas whose probes get no answer, although the engine says they are fine."""
    work: dict[str, int] = field(default_factory=dict)
    """By service: requests that its ready replicas share."""
    waiting: dict[str, dict[str, int]] = field(default_factory=dict)
    """By service: what each of its replicas has waiting, by the service that it waits for."""
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By version: requests that each of its replicas has answered, and errors among them."""
    stuck: set[str] = field(default_factory=set)
    """Names of replicas that say they are ready and have two requests that never move."""
    starts: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By service: progress and words of its replicas that start."""
    user_configs: dict[str, str] = field(default_factory=dict)
    """By container: what is in force there."""
    contracts: dict[str, bytes] = field(default_factory=dict)
    """By version: what its replicas tell of their contract; others have none."""
    refused: set[str] = field(default_factory=set)
    """User_configs that no replica takes."""
    given: list[tuple[str, str]] = field(default_factory=list)
    """Addresses of replicas, and the user_config that each was given."""
    can_sleep: set[str] = field(default_factory=set)
    """Services whose replicas can sleep."""
    sleeps: set[str] = field(default_factory=set)
    """Ids of the containers that do."""
    is_manual: bool = False
    actions_to_live: int | None = None
    """The controller dies right after so many more actions, before it can note what they did; None = it lives."""
    swarm: FakeSwarm | None = None
    """Has the state in its configs; None = the state is in a file."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """A controller has asked for its own end."""
    certificate_ends_at: float | None = None
    certificates: PemWatch | None = None
    acme: AcmeWatch | None = None
    public_keys: PemWatch | None = None
    query: Query = no_prometheus
    series: AskSeries = no_series
    ask_traces: AskTraces = no_traces
    rules: AskRules = no_rules
    silencer: Silencer | None = None
    edge: EdgeAddress = PLAIN
    grafana_port: int | None = None
    controller: Controller = field(init=False)
    manager: FakeConfigs = field(init=False)
    file: StateFile = field(init=False)
    store: StateStore = field(init=False)

    @classmethod
    def of(cls, directory: Path, *services: ServiceSpec, engine: FakeEngine | None = None) -> Self:
        engine = FakeEngine(wall_clock) if engine is None else engine
        for service in services:
            engine.add_image(service.image)
        source = FakeSource({service.name: service for service in services})
        return cls(directory, engine, FakeRouter(answers=lambda name: engine.readiness(name) == "ready"), source)

    @property
    def view(self) -> View:
        """What the controller published last."""
        return self.controller.view

    async def give(self, address: str, text: str, token: str) -> UserConfigReport:
        """Take a user_config the way the replica at that address would."""
        self.given.append((address, text))
        container = await self._at(address, token)
        container.user_config = text
        return self.configured(container)

    async def tell_to_sleep(self, address: str, wanted: bool, token: str) -> SleepReport:
        """Sleep, or wake up, the way the replica at that address would: at once."""
        container = await self._at(address, token)
        (self.sleeps.add if wanted else self.sleeps.discard)(container.id)
        return self.sleeping(container)

    def sleeping(self, container: FakeContainer) -> SleepReport:
        """What a replica says of its sleep."""
        sleeps = container.id in self.sleeps
        return SleepReport(container.service in self.can_sleep, sleeps, sleeps)

    async def _at(self, address: str, token: str) -> FakeContainer:
        """The container whose admin port has this address."""
        await asyncio.sleep(0)
        if self.actions_to_live == 0:
            raise Died
        for container in self.engine.containers.values():
            if address == f"{container.ip}:9100" and self.engine.readiness(container.name) in ("ready", "starting"):
                assert token == container.admin_token != "", "else the replica refuses it"
                return container
        raise ReplicaError(f"http://{address} does not answer: nobody is there")

    def configured(self, container: FakeContainer) -> UserConfigReport:
        """What a replica says of its user_config."""
        wanted, error = container.user_config, ""
        if wanted in self.refused:
            error = "Part.reconfigure raised ValueError: no such threshold"
        else:
            self.user_configs[container.id] = wanted
        return UserConfigReport(digest(wanted), digest(self.user_configs.get(container.id, NO_USER_CONFIG)), error)

    async def ask(self, subject: Subject) -> ProbeReading:
        """Answer a probe the way the fake engine's container would."""
        await asyncio.sleep(0)
        container = self.engine.containers.get(subject.container_id)
        reading = self._reading(container)
        if container is None or reading.ongoing is None:
            return reading
        return replace(reading, user_config=self.configured(container), sleep=self.sleeping(container))

    async def ask_contract(self, subject: Subject) -> bytes | None:
        """Answer as the fake engine's container would."""
        await asyncio.sleep(0)
        container = self.engine.containers.get(subject.container_id)
        return self.contracts.get(container.version, b"") if container else None

    def _reading(self, container: FakeContainer | None) -> ProbeReading:
        name = container.name if container else ""
        state = "silent" if name in self.silent else self.engine.readiness(name)
        match state:
            case "ready" if name in self.stuck:
                return ProbeReading(ok=True, detail="200 from :9100/readyz", ongoing=2, queued=0, progress=5)
            case "ready":
                service = name.removeprefix(f"{PROJECT}-").rsplit("-", 2)[0]
                waiting = self.waiting.get(service, {})
                answered, errors = self.answers.get(container.version if container else "", (0, 0))
                return ProbeReading(
                    ok=True,
                    detail="200 from :9100/readyz",
                    ongoing=self._share(service, name),
                    queued=sum(waiting.values()),
                    waiting=waiting,
                    answered=answered,
                    used=answered,
                    errors=errors,
                )
            case "draining":
                return ProbeReading(
                    ok=False, detail="503 from :9100/readyz: draining", reported_draining=True, ongoing=0, queued=0
                )
            case "starting":
                progress, told = self.starts.get(container.service if container else "", (None, ""))
                detail, stage = f"503 from :9100/readyz: {told or 'loading'}", told.partition(",")[0]
                return ProbeReading(False, detail, ongoing=0, queued=0, progress=progress, reason=told, stage=stage)
            case _:
                return ProbeReading(ok=False, detail="no answer from :9100/readyz within 2 s")

    def _share(self, service: str, replica: str) -> int:
        names = sorted(c.name for c in self.engine.containers.values() if c.service == service)
        ready = [name for name in names if self.engine.readiness(name) == "ready"]
        each, more = divmod(self.work.get(service, 0), max(len(ready), 1))
        return each + (replica in ready[:more])

    @contextlib.asynccontextmanager
    async def running(self, **replicas: int) -> AsyncIterator[Controller]:
        """A controller from its start to its end, which leaves the world as it is. Within: these services have settled
        at as many replicas.
        """

        class Ended(Exception):
            pass

        holder = await self._holder() if self.swarm else None
        self.file = StateFile(self.directory)
        self.store = StateStore(holder.rows if holder else self.file)
        try:
            async with asyncio.TaskGroup() as tasks:
                if holder:
                    tasks.create_task(holder.run())
                engine, router = Mortal(self.engine, self), Mortal(self.router, self)
                world = World(
                    PROJECT,
                    Boundaries(
                        engine,
                        router,
                        self.source,
                        self.store,
                        holder.controller_clock if holder else self.clock,
                        Gatekeeper(()),
                        policy_dir=self.directory,
                        acts=holder.acts if holder else lambda: True,
                        node_commands=SwarmNodeCommands if self.engine.places != "ours" else NoNodes,
                        certificate_ends_at=self.certificate_ends_at,
                        certificates=self.certificates,
                        acme=self.acme,
                        public_keys=self.public_keys,
                    ),
                    self.ask,
                    self.query,
                    self.series,
                    rules=self.rules,
                    silencer=self.silencer,
                    is_manual=self.is_manual,
                    run=directly,
                    give=self.give,
                    tell_to_sleep=self.tell_to_sleep,
                    operate=operate,
                    ask_contract=self.ask_contract,
                    ask_traces=self.ask_traces,
                    end=self.has_ended.set,
                    edge=self.edge,
                    grafana_port=self.grafana_port,
                )
                self.controller = assemble(world, tasks.create_task, wall=self.wall, engine_lost_s=self.engine_lost_s)
                self.controller.start(tasks.create_task)
                for name, count in replicas.items():
                    await self.settled(name, count)
                yield self.controller
                raise Ended  # noqa: TRY301
        except* (Ended, Died):
            pass
        finally:
            self.store.close()

    async def _holder(self) -> StateHolder:
        """The hold of a controller on the state in Swarm, once it has the lease."""
        assert self.swarm is not None
        self.manager = self.swarm.manager()
        document = SwarmDocument(self.manager, f"{PROJECT}_pierhead-state")
        holder = StateHolder(document, clock=self.clock, wall=self.wall, monotonic=self.clock)
        await holder.take(asyncio.Event())
        return holder

    def wall(self) -> float:
        """The machine's wall clock, which `set_clock` sets."""
        return wall_clock() + self.engine.clock_set_by_s

    def set_clock(self, by_s: float) -> None:
        """An operator sets the machine's clock forward, or back."""
        self.engine.clock_set_by_s += by_s

    def row(self, service: str) -> tuple[int, int, int]:
        """(wanted, ready, replicas shown) of a service, as the status says."""
        rows = [row for row in self.view.services if row.name == service]
        return (rows[0].wanted, rows[0].ready, len(rows[0].replicas)) if rows else (-1, -1, -1)

    async def settled(self, service: str, replicas: int, within_s: float | None = None) -> None:
        await until(lambda: self.row(service) == (replicas, replicas, replicas), within_s)

    def events(self, kind: str | None = None) -> list[Event]:
        events = [stored.event for stored in self.controller.events.select(limit=1000)]
        return [event for event in events if kind in (None, event.kind)]

    def said(self, kind: str) -> list[str]:
        """Messages of the events of one kind."""
        return [event.message for event in self.events(kind)]

    def set_disk_full(self, is_full: bool) -> None:
        """Whether the store's file can be written."""
        self.file.db.execute(f"PRAGMA query_only = {'ON' if is_full else 'OFF'}")

    def kinds(self, outcome: str | None = None) -> list[str]:
        """Kinds of the events so far."""
        return [event.kind for event in self.events() if outcome in (None, event.outcome)]
