"""A router that keeps its servers in memory, for tests of the controller."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from controller.errors import RoutingError, RoutingUnreachable
from controller.model.actions import (
    AddServer,
    DeleteServer,
    SetServerState,
    SetServerWeight,
    SetWaitingRoom,
    WriteKeys,
    WriteRouting,
)
from controller.model.keys import NO_KEYS, KeySet
from controller.model.spec import ServiceSpec, backend_name
from controller.model.world import HeldRequests, RoutingState, Server, ServerState
from controller.routing.base import RoutingAction


@dataclass
class FakeRouter:
    """HAProxy in memory, held to the real one by tests/contract/test_router_contract.py. `up` = it answers."""

    up: bool = True
    hangs: bool = False
    """It does not answer, and its HTTP port is silent."""
    problem: RoutingError | None = None
    """Why its answers cannot be read."""
    reading_s: float = 0.0
    """How long it takes to answer; the answer is then as old."""
    pid: int = 1
    servers: dict[tuple[str, str], Server] = field(default_factory=dict)
    backends: frozenset[str] = frozenset()
    hash: str = ""
    keys: KeySet = NO_KEYS
    used: dict[str, float] = field(default_factory=dict)
    """Seconds since the last use of a key, by name."""
    done: list[RoutingAction] = field(default_factory=list)
    failing: dict[type[RoutingAction], RoutingError] = field(default_factory=dict)
    answers: Callable[[str], bool] = lambda name: True
    """Whether the replica of that name passes HAProxy's own check: asked when it is added, and until it does."""
    held: dict[str, HeldRequests] = field(default_factory=dict)
    """By backend. With the first server that takes traffic nothing is held any more."""
    closed: set[str] = field(default_factory=set)
    away: frozenset[str] = frozenset()
    ill: dict[str, Callable[[], bool]] = field(default_factory=dict)
    """Names of servers that its own check has found down, and whether that would pass again."""

    async def observe(self) -> RoutingState:
        if self.problem is not None:
            raise self.problem
        await self._hang(5.0)
        state = self._state() if self.up and not self.hangs else None
        await asyncio.sleep(self.reading_s)
        if state is None:
            raise RoutingUnreachable("it is away")
        return state

    def _state(self) -> RoutingState:
        self._check()
        servers = tuple(self.servers.values())
        taking = {server.backend for server in servers if server.state is ServerState.READY and server.up}
        held = {backend: HeldRequests() if backend in taking else held for backend, held in self.held.items()}
        pid, closed = self.pid, frozenset(self.closed)
        return RoutingState(
            pid,
            float(pid),
            "3.0.11",
            self.hash,
            servers,
            self.backends,
            held=held,
            closed=closed,
            keys=self.keys.digest,
            away=self.away,
        )

    async def key_ages(self) -> Mapping[str, float]:
        if not self.up:
            raise RoutingUnreachable("it is away")
        return self.used

    async def http_is_silent(self) -> bool:
        await self._hang(2.0)
        return self.hangs

    async def _hang(self, at_most_s: float) -> None:
        """Keep the controller waiting for as long as the real sockets do, or until HAProxy is killed."""
        loop = asyncio.get_running_loop()
        given_up_at = loop.time() + at_most_s
        while self.hangs and loop.time() < given_up_at:  # noqa: ASYNC110  tests set it, as they set all of this
            await asyncio.sleep(0.05)

    async def perform(self, action: RoutingAction) -> None:
        await asyncio.sleep(0)
        self.done.append(action)
        if type(action) in self.failing:
            raise self.failing[type(action)]
        self._carry_out(action)

    def _carry_out(self, action: RoutingAction) -> None:
        match action:
            case WriteRouting():
                self.hash = action.routing_hash
                self.backends = frozenset(backend_name(service.name) for service in action.services)
                self.closed.clear()  # a new worker begins with all of them open
            case WriteKeys():
                self.keys = action.keys
            case SetWaitingRoom():
                (self.closed.discard if action.is_open else self.closed.add)(action.backend)
            case AddServer():
                self._put(self._new(action))
            case SetServerWeight():
                self._put(replace(self._known(action), weight=action.weight))
            case SetServerState():
                server = self.servers.get((action.backend, action.target))
                if server:
                    self._put(replace(server, state=action.state))
            case DeleteServer():
                self.servers.pop((action.backend, action.target), None)

    def routing_hash(self, services: Collection[ServiceSpec]) -> str:
        routes = sorted(
            (one.name, one.matched, one.application or "", one.replica_header, one.auth, *one.allow, *one.grpc_services)
            for one in services
        )
        return hashlib.sha256(repr(routes).encode()).hexdigest()[:8]

    def restart(self) -> None:
        """A new process, without servers."""
        self.pid += 1
        self.servers.clear()
        self.closed.clear()

    def mark_down(self, name: str, until: Callable[[], bool] = lambda: False) -> None:
        """HAProxy's own check of that server fails, until it passes again: another replica may have the name then."""
        self.ill[name] = until
        self._set_up(name, up=False)

    def _check(self) -> None:
        for name in [name for name, is_well in self.ill.items() if is_well()]:
            del self.ill[name]
            self._set_up(name, up=True)

    def _new(self, action: AddServer) -> Server:
        up = self.answers(action.target)
        if not up:
            self.ill[action.target] = partial(self.answers, action.target)
        return Server(action.backend, action.target, action.address, ServerState.READY, up=up, weight=action.weight)

    def _set_up(self, name: str, *, up: bool) -> None:
        for server in [server for server in self.servers.values() if server.name == name]:
            self._put(replace(server, up=up))

    def ready(self, service: str) -> list[str]:
        """Names of the servers that get traffic."""
        return sorted(
            server.name
            for server in self.servers.values()
            if server.backend == backend_name(service) and server.state is ServerState.READY
        )

    def _known(self, action: SetServerWeight) -> Server:
        if (action.backend, action.target) not in self.servers:
            raise RoutingError(f"set weight {action.backend}/{action.target}: No such server.")
        return self.servers[(action.backend, action.target)]

    def _put(self, server: Server) -> None:
        self.servers[(server.backend, server.name)] = server
