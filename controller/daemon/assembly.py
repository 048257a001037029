"""Constructs the controller's parts. `__main__` passes the real engine, router and store, tests pass fakes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from pierhead.discovery.served import DiscoveryState

from ..desired.deployer import Deployer
from ..desired.desired import Desirer
from ..desired.functions import FunctionCalls, Functions, Run, in_thread
from ..desired.keys import KeysInForce
from ..desired.measurements import Measurements, Query
from ..desired.policies import Policies
from ..desired.remaining import RemainingServices
from ..desired.scaler import Scaler
from ..errors import EngineUnreachable, StoreError
from ..files.acme import AcmeWatch
from ..files.pem import PemWatch, Validity
from ..files.watch import SpecWatch
from ..model.keys import NO_KEYS
from ..observe.alertmanager import Silencer
from ..observe.contracts import ImageContracts
from ..observe.engine_events import LOST_S, EngineEvents
from ..observe.gpu_marks import GpuMarks
from ..observe.gpu_memory import GpuMemoryWatch
from ..observe.judge import ProbeReading
from ..observe.key_uses import KeyUses
from ..observe.prober import AskContract, Prober, Subject, no_contract
from ..observe.router_silence import RouterWatch
from ..observe.snapshot import Observer, engine_watch
from ..observe.traces import AskTraces, ReplicaTraces, no_traces
from ..outlive import Background, Spawn, outlive
from ..plan import plan
from ..plan.failures import obsolete_failures
from ..status.publisher import Publisher
from ..status.traffic import AskSeries
from ..status.view import View
from ..storage.events import EventLog
from ..storage.store import StateStore
from .alerts import AlertCommands, AskRules
from .api import Api
from .apply import Executor, Give, Performer, Reporter, TellToSleep
from .backup import BackupCommands
from .boundaries import Boundaries
from .callers import Gatekeeper
from .commands import Commands
from .edge_calls import PLAIN, EdgeAddress
from .keys import MOST_KEYS, MOST_KEYS_OF_NODES, KeyCommands
from .llm_replicas import OperateReplica
from .loop import Loop, Wakeup
from .nodes import NodeParts
from .webhook import LAST, Send, Webhook


@dataclass(frozen=True, slots=True)
class World:
    """What the controller acts on and reads."""

    project: str
    boundaries: Boundaries
    ask: Callable[[Subject], Awaitable[ProbeReading]]
    """Asks a replica whether it is ready."""
    query: Query
    """Asks Prometheus for the number that a service is autoscaled by."""
    series: AskSeries
    """Asks the stack's Prometheus for series."""
    give: Give
    """Sends a replica its user_config."""
    tell_to_sleep: TellToSleep
    """Tells a replica to sleep, or to wake up."""
    operate: OperateReplica
    """Has a replica of a language model do what an operator asks for."""
    rules: AskRules
    """Asks the stack's Prometheus for the rules of alerts, and what fires."""
    silencer: Silencer | None = None
    """The stack's Alertmanager; None = alerts are sent nowhere."""
    is_manual: bool = False
    """New versions wait for `pierhead deploy`."""
    router_silence_s: float = 10.0
    """How long HAProxy may hang before it is restarted."""
    run: Run = in_thread
    """How autoscaling functions are called."""
    ask_contract: AskContract = no_contract
    """Asks a replica for its contract."""
    ask_traces: AskTraces = no_traces
    """Asks a replica for the traces that it keeps."""
    end: Callable[[], None] = lambda: None
    """Ends this controller."""
    send: Send | None = None
    """Sends a message to the operator's webhook; None = there is none."""
    edge: EdgeAddress = PLAIN
    """Where operators' requests are tried."""
    grafana_port: int | None = None
    """Of the machine; None = there is no Grafana."""


@dataclass(frozen=True, slots=True)
class Controller:
    """The parts that are used outside the loop."""

    loop: Loop
    commands: Commands
    publisher: Publisher
    events: EventLog
    specs: SpecWatch
    deployer: Deployer
    scaler: Scaler
    observer: Observer
    executor: Executor
    discovery_state: DiscoveryState
    engine_events: EngineEvents
    certificates: PemWatch | None
    acme: AcmeWatch | None
    public_keys: PemWatch | None
    key_uses: KeyUses
    webhook: Webhook | None
    series: AskSeries
    traces: ReplicaTraces
    edge: EdgeAddress
    grafana_port: int | None
    clock: Callable[[], float]
    wall: Callable[[], float]

    @property
    def view(self) -> View:
        """What the last tick published."""
        return self.publisher.view

    def start(self, spawn: Spawn) -> None:
        """Start the readers of files, engine and HAProxy, and the loop. They end with the owner of `spawn`."""
        spawn(outlive("watching the compose files", self.specs.run))
        spawn(outlive("following the engine", self.engine_events.follow, ends_with=(EngineUnreachable,)))
        spawn(outlive("reading the engine", self.observer.engine.run))
        spawn(outlive("reading HAProxy", self.observer.router.run))
        if self.certificates is not None:
            spawn(outlive("watching the certificates", partial(self.certificates.run, self.events)))
        if self.acme is not None:
            spawn(outlive("watching the container acme", partial(self.acme.run, self.events)))
        if self.public_keys is not None:
            run = partial(self.public_keys.run, self.events, self.specs.takes_tokens)
            spawn(outlive("watching the public keys of tokens", run))
        spawn(outlive("watching the use of keys", self.key_uses.run))
        if self.webhook is not None:
            spawn(outlive("sending events to the webhook", self.webhook.run))
        spawn(outlive("the loop", self.loop.run))

    def api(self, gatekeeper: Gatekeeper) -> Api:
        """Return the REST API over these parts."""
        return Api(
            self.commands,
            self.publisher,
            self.events,
            self.specs,
            self.executor,
            gatekeeper,
            self.series,
            self.traces,
            self.edge,
            self.grafana_port,
            self.clock,
            self.wall,
        )


def assemble(
    world: World,
    spawn: Spawn,
    *,
    wall: Callable[[], float] = time.time,
    engine_lost_s: float = LOST_S,
) -> Controller:
    """Construct the parts. `spawn` owns the tasks that they start.

    `wall` may jump; people and the engine use it.
    """
    at, wakeup = world.boundaries, Wakeup()
    store, clock = at.store, at.clock
    events, discovery_state = EventLog(store, wall), DiscoveryState(clock=clock)
    _note_replaced_store(store, events)
    specs = SpecWatch(at.source, events, wakeup.ring)

    background = Background(spawn, wakeup.ring, clock)
    contracts = ImageContracts(at.engine, world.project, background)
    deployer = Deployer(store, events, discovery_state.callers, contracts.of, world.is_manual)
    measurements = Measurements(world.query, background)
    functions = Functions(at.policy_dir, ahead=lambda: wall() - clock())
    calls = FunctionCalls(functions.call, world.run, background)
    scaler = Scaler(store, events, Policies(calls.wanted, measurements.value).ask)

    webhook = Webhook(world.send, world.project, events, store.sent) if world.send else None
    if webhook is None:
        store.sent.drop(LAST)  # one that is set later begins with what happens then
    gpu_memory = GpuMemoryWatch(at.engine, background)
    gpu_marks = GpuMarks(store, events, deployer.proven, wakeup.ring, at.engine.places)
    publisher = Publisher(
        world.project,
        store,
        events,
        specs,
        scaler,
        deployer,
        gpu_memory,
        discovery_state,
        clock,
        wall,
        at.certificate_ends_at,
        partial(_client_certificates, at),
        partial(_notices, at, specs, webhook),
    )
    metrics = publisher.metrics

    prober = Prober(world.ask, background, store.seen_ready, store.note_ready, world.ask_contract)
    engine = engine_watch(at.engine, store, background, metrics.engine_reading)
    router = RouterWatch(at.router, background, metrics.haproxy_reading)
    observer = Observer(engine, router, prober, store, gpu_memory, gpu_marks, clock, wall)
    engine_events = EngineEvents(at.engine, world.project, observer, events, wakeup.ring, clock, engine_lost_s)

    remaining = RemainingServices(store.revisions, deployer.state, discovery_state.callers)
    routing_hash, silence_s = at.router.routing_hash, world.router_silence_s
    in_force = KeysInForce(store.service_keys, wall)
    desirer = Desirer(store, events, scaler, deployer, remaining, in_force, routing_hash, obsolete_failures, silence_s)
    tell = world.give, world.tell_to_sleep, prober.learn

    def acts() -> bool:
        return at.acts() and not store.is_replaced

    performer = Performer(at.engine, at.router, store, events, world.project, *tell, acts, clock)

    async def may_act() -> bool:
        try:
            await store.stored()
        except StoreError:
            return False
        return acts()

    reporter = Reporter(events, metrics, observer, gpu_marks, wakeup.ring)
    executor = Executor(performer.perform, reporter.report, spawn, clock)
    loop = Loop(specs, observer, desirer, plan, executor, publisher, wakeup, may_act, clock)
    nodes = at.node_commands(
        NodeParts(
            seen=lambda: observer.latest,
            services=lambda: specs.current.services if specs.current else {},
            perform=performer.perform,
            report=reporter.report,
            look_again=loop.look_again,
            clock=clock,
        )
    )
    key_uses = KeyUses(at.router, store.service_keys, store.key_uses, wall)

    def haproxy_has_keys() -> bool:
        wanted = in_force.now(specs.current.services.values() if specs.current else ())
        routing = observer.latest.routing
        return wanted is NO_KEYS or (routing is not None and routing.keys == wanted.digest)

    most = MOST_KEYS if at.engine.places == "ours" else MOST_KEYS_OF_NODES
    keys = KeyCommands(store, key_uses, specs.known, haproxy_has_keys, wakeup.ring, wall, most)
    commands = Commands(
        store,
        events,
        specs,
        deployer,
        at.engine,
        observer,
        gpu_marks,
        world.operate,
        wakeup.ring,
        loop.look_again,
        nodes,
        keys,
        AlertCommands(world.rules, world.silencer, specs.known, wall),
        BackupCommands(store, world.project, world.end, wall),
        clock,
    )
    return Controller(
        loop=loop,
        commands=commands,
        publisher=publisher,
        events=events,
        specs=specs,
        deployer=deployer,
        scaler=scaler,
        observer=observer,
        executor=executor,
        discovery_state=discovery_state,
        engine_events=engine_events,
        certificates=at.certificates,
        acme=at.acme,
        public_keys=at.public_keys,
        key_uses=key_uses,
        webhook=webhook,
        series=world.series,
        traces=ReplicaTraces(prober, world.ask_traces),
        edge=world.edge,
        grafana_port=world.grafana_port,
        clock=clock,
        wall=wall,
    )


def _client_certificates(at: Boundaries) -> Mapping[str, Validity]:
    """When HAProxy's certificates for clients are valid, by their files."""
    found = at.certificates.validity() if at.certificates else {}
    return at.acme.validity(found) if at.acme else found


def _notices(at: Boundaries, specs: SpecWatch, webhook: Webhook | None) -> tuple[str, ...]:
    """What is wrong with the .pem files that are needed, the certificate that ACME gives, and the webhook."""
    needed = (at.acme, at.certificates, at.public_keys if specs.takes_tokens() else None, webhook)
    return tuple(notice for watch in needed if watch for notice in watch.notices())


def _note_replaced_store(store: StateStore, events: EventLog) -> None:
    if store.set_aside is not None:
        lost = (
            f"the state was damaged, and is kept at {store.set_aside}; scale targets are the files' again, and keys "
            "of clients are gone (`pierhead restore` brings back a backup)"
        )
        events.record("store_replaced", lost, outcome="warning")
