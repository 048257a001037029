"""A Docker Engine, a HAProxy and replicas in memory, which the planner observes and changes in a simulation.

One service. A request goes to the ready replica with the fewest requests, if that has room (`max_ongoing_requests`);
else it waits in the service's queue, for `request_timeout_s` at most. A replica works on `places` requests at a time;
its other requests wait inside it. Time is an argument, chance a seeded generator.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from controller.model.actions import (
    Action,
    AddServer,
    BeginRetirement,
    CreateContainer,
    DeleteServer,
    RemoveContainer,
    SetServerState,
    SignalContainer,
    StartContainer,
    replica_name,
)
from controller.model.observed import Observed
from controller.model.spec import ServiceSpec, backend_name
from controller.model.world import (
    ContainerState,
    Gpu,
    ReplicaContainer,
    ReplicaHealth,
    Retirement,
    RoutingState,
    Server,
    ServerState,
    version_of,
)
from controller.storage.store import StateStore

from .distributions import Distribution

PROJECT = "simulation"
IMAGE_ID = "sha256:simulated"

Happening = Literal["finished", "ready", "exited"]
Later = Callable[[float, Happening, "Replica", int], None]
"""Schedules an event of a replica (and of a request, by number) at a time."""


@dataclass(slots=True, eq=False)
class Replica:
    """One container and the process in it."""

    id: str
    name: str
    version: str
    number: int
    gpus: tuple[str, ...]
    created_at: float
    state: ContainerState = ContainerState.CREATED
    started_at: float | None = None
    ready_since: float | None = None
    exit_code: int | None = None
    stopping: bool = False
    leaving: bool = False
    """Its retirement has begun: it gets no new requests."""
    server: ServerState | None = None
    working: int = 0
    finished: int = 0
    backlog: deque[int] = field(default_factory=deque)
    """Accepted requests that wait inside it."""

    @property
    def ongoing(self) -> int:
        """Requests that it works on or that wait inside it."""
        return self.working + len(self.backlog)

    @property
    def is_ready(self) -> bool:
        """Whether its process answers."""
        return self.state is ContainerState.RUNNING and self.ready_since is not None


@dataclass(slots=True)
class Requests:
    """The outcomes of the requests. `latency` and `waited` have the order of `finished_at`."""

    arrived: array[float] = field(default_factory=lambda: array("d"))
    needs: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of work of each request, by number."""
    finished_at: array[float] = field(default_factory=lambda: array("d"))
    latency: array[float] = field(default_factory=lambda: array("d"))
    waited: array[float] = field(default_factory=lambda: array("d"))
    """Seconds until work on each finished request began."""
    refused_at: array[float] = field(default_factory=lambda: array("d"))
    timed_out: int = 0
    """Refused requests that had waited too long; for the others the queue was full."""
    lost: int = 0
    """Requests whose replica was killed."""


class SimulatedWorld:
    """The state of everything outside the controller."""

    def __init__(
        self,
        spec: ServiceSpec,
        store: StateStore,
        start_time: Distribution,
        rng: Random,
        later: Later,
        *,
        places: int,
        failing_starts: float = 0.0,
        gpus: int = 0,
    ) -> None:
        self.spec = spec
        self.requests = Requests()
        self.replicas: dict[str, Replica] = {}
        self.queue: deque[int] = deque()
        self.starts = self.failed_starts = 0
        self._store = store
        self._start_time = start_time
        self._rng = rng
        self._later = later
        self._places = places
        self._failing_starts = failing_starts
        self._gpus = tuple(Gpu(f"GPU-{number}") for number in range(gpus))
        self._routable: list[Replica] = []
        self._made = 0

    # --------------------------------------------------------------------------------------------------- the requests

    @property
    def in_work(self) -> int:
        """Requests at replicas."""
        return sum(replica.ongoing for replica in self.replicas.values())

    @property
    def ready(self) -> int:
        """Replicas that take requests."""
        return len(self._routable)

    @property
    def present(self) -> int:
        """Running containers."""
        return sum(replica.state is ContainerState.RUNNING for replica in self.replicas.values())

    @property
    def utilisation(self) -> float:
        """Percent of the ready replicas' places that are taken; 0 without any."""
        places = self._places * len(self._routable)
        return 100.0 * sum(replica.working for replica in self._routable) / places if places else 0.0

    def arrive(self, needs_s: float, now: float) -> None:
        """Take a request of `needs_s` seconds of work."""
        request = len(self.requests.arrived)
        self.requests.arrived.append(now)
        self.requests.needs.append(needs_s)
        replica = min(self._routable, key=lambda replica: replica.ongoing, default=None)
        if replica is not None and replica.ongoing < self.spec.max_ongoing_requests:
            self._accept(replica, request, now)
            return
        self.expire(now)
        if 0 <= self.spec.max_queued_requests <= len(self.queue):
            self.requests.refused_at.append(now)
        else:
            self.queue.append(request)

    def expire(self, now: float) -> None:
        """Refuse the requests that have waited too long."""
        limit_s, requests = self.spec.request_timeout_s, self.requests
        while self.queue and now - requests.arrived[self.queue[0]] > limit_s:
            requests.refused_at.append(requests.arrived[self.queue.popleft()] + limit_s)
            requests.timed_out += 1

    def finish(self, replica: Replica, request: int, now: float) -> None:
        """End a request; its replica takes the next one."""
        if not replica.state.is_up:
            return  # the replica was killed, and the request with it
        requests = self.requests
        requests.finished_at.append(now)
        requests.latency.append(now - requests.arrived[request])
        requests.waited.append(now - requests.arrived[request] - requests.needs[request])
        replica.working -= 1
        replica.finished += 1
        if replica.backlog:
            self._work(replica, replica.backlog.popleft(), now)
        self._fill(replica, now)
        if replica.stopping and not replica.ongoing:
            self._exit(replica, 0)

    def _accept(self, replica: Replica, request: int, now: float) -> None:
        if replica.working < self._places:
            self._work(replica, request, now)
        else:
            replica.backlog.append(request)

    def _work(self, replica: Replica, request: int, now: float) -> None:
        replica.working += 1
        self._later(now + self.requests.needs[request], "finished", replica, request)

    def _fill(self, replica: Replica, now: float) -> None:
        """Send queued requests to a replica while it has room."""
        if not self.queue or not self._takes(replica):
            return
        self.expire(now)
        while self.queue and replica.ongoing < self.spec.max_ongoing_requests:
            self._accept(replica, self.queue.popleft(), now)

    def _takes(self, replica: Replica) -> bool:
        if replica.leaving or not replica.is_ready:
            return False
        return replica.server is ServerState.READY or not self.spec.is_routed

    # ----------------------------------------------------------------------------------------------- what happens to it

    def begin_with(self, count: int, now: float) -> None:
        """Create replicas that are ready from the beginning."""
        version = version_of(self.spec.definition_hash, IMAGE_ID)
        for number in range(1, count + 1):
            gpus = self._gpus[(number - 1) * self._gpus_each : number * self._gpus_each]
            name = replica_name(PROJECT, self.spec.name, version, number)
            replica = self._create(name, version, number, tuple(gpu.uuid for gpu in gpus), now)
            replica.state, replica.started_at, replica.ready_since = ContainerState.RUNNING, now, now
            replica.server = ServerState.READY if self.spec.is_routed else None
        self._reroute(now)

    @property
    def _gpus_each(self) -> int:
        return self.spec.gpu.count if self.spec.gpu else 0

    def become_ready(self, replica: Replica, now: float) -> None:
        """A replica has started."""
        if replica.state is ContainerState.RUNNING:
            replica.ready_since = now
            self._reroute(now)

    def fail(self, replica: Replica) -> None:
        """A replica exits during its start."""
        if replica.state is ContainerState.RUNNING:
            self.failed_starts += 1
            self._exit(replica, 1)

    def _exit(self, replica: Replica, code: int) -> None:
        self.requests.lost += replica.ongoing
        replica.state, replica.exit_code = ContainerState.EXITED, code
        replica.working, replica.ready_since = 0, None
        replica.backlog.clear()

    def _create(self, name: str, version: str, number: int, gpus: tuple[str, ...], now: float) -> Replica:
        self._made += 1
        replica = Replica(f"c{self._made}", name, version, number, gpus, now)
        self.replicas[name] = replica
        return replica

    def _reroute(self, now: float) -> None:
        self._routable = [replica for replica in self.replicas.values() if self._takes(replica)]
        for replica in self._routable:
            self._fill(replica, now)

    # ---------------------------------------------------------------------------------------------- the planner's side

    def observed(self, now: float) -> Observed:
        """The snapshot of this world."""
        backend = backend_name(self.spec.name)
        servers = tuple(
            Server(backend, replica.name, _address(replica), replica.server, up=True, sessions=replica.ongoing)
            for replica in self.replicas.values()
            if replica.server is not None
        )
        routing = RoutingState(1, 0.0, "simulated", "", servers, frozenset({backend}), {backend: len(self.queue)})
        return Observed(
            containers=tuple(_container(replica, self.spec.name, now) for replica in self.replicas.values()),
            images={self.spec.image: IMAGE_ID},
            gpus=self._gpus,
            routing=routing,
            retirements=self._store.retirements.snapshot(),
            failures=self._store.failures.snapshot(),
        )

    def perform(self, action: Action, now: float) -> None:
        """Carry out an action, at once."""
        match action:
            case CreateContainer():
                uuids = tuple(gpu.uuid for gpu in action.gpus)
                self._create(action.target, action.version, action.number, uuids, now)
            case StartContainer():
                self._start(self.replicas[action.target], now)
            case BeginRetirement():
                self._store.retire(
                    Retirement(action.target, action.container_id, now, None, action.cause, action.failed)
                )
                self.replicas[action.target].leaving = True
            case SignalContainer():
                self._signal(self.replicas[action.target], action, now)
            case RemoveContainer():
                if action.failed:
                    self._store.failure((self.spec.name, action.version), now, action.cause)
                self._store.forget(action.container_id)
                del self.replicas[action.target]
            case AddServer():
                self.replicas[action.target].server = ServerState.READY
            case SetServerState():
                self.replicas[action.target].server = action.state
            case DeleteServer():
                self.replicas[action.target].server = None
            case _:
                return  # routes and images exist from the beginning
        self._reroute(now)

    def _start(self, replica: Replica, now: float) -> None:
        replica.state, replica.started_at = ContainerState.RUNNING, now
        self.starts += 1
        takes_s, fails = self._start_time.sample(self._rng), self._rng.random() < self._failing_starts
        self._later(now + takes_s, "exited" if fails else "ready", replica, -1)

    def _signal(self, replica: Replica, action: SignalContainer, now: float) -> None:
        if action.signal == "SIGKILL":
            self._exit(replica, 137)
            return
        self._store.stopping(action.container_id, now)
        replica.stopping = True
        if not replica.ongoing:
            self._exit(replica, 0)


def _address(replica: Replica) -> str:
    return f"10.0.{replica.number // 250}.{replica.number % 250 + 1}:8080"


def _container(replica: Replica, service: str, now: float) -> ReplicaContainer:
    address, _, port = _address(replica).partition(":")
    return ReplicaContainer(
        id=replica.id,
        name=replica.name,
        service=service,
        version=replica.version,
        number=replica.number,
        state=replica.state,
        ip=address,
        port=int(port),
        gpus=replica.gpus,
        created_at=replica.created_at,
        started_at=replica.started_at,
        exit_code=replica.exit_code,
        health=ReplicaHealth.READY if replica.ready_since is not None else ReplicaHealth.UNKNOWN,
        ready_since=replica.ready_since,
        ongoing=replica.ongoing,
        ongoing_at=now,
        used=replica.finished,
        waiting={},
    )
