"""Discovery: sends callers the replicas of each service that they watch, and again at each change.

    DiscoveryState  the numbered state of each service, and the watchers
    Watcher         the services whose state has changed since it was sent to one caller

The controller serves it, and so does the runner of an application's processes.

The numbers that replicas publish for policies (`ReplicaEndpoint.stats`) change constantly. A change of these numbers
alone is sent STATS_PERIOD_S after the last state of that service, or earlier together with another change.

Nothing is sent before the loop's first complete observation: a caller keeps the replicas that an earlier controller
sent, and does not receive an empty list.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

import grpc

from pierhead.discovery.v1 import discovery_pb2, discovery_pb2_grpc
from pierhead.store.memory import MemoryStore, Store
from pierhead.store.served import add_store

logger = logging.getLogger(__name__)

MOST_WATCHED = 1000
LONGEST_NAME = 253
"""Characters of a service's name, and of a watcher's."""
MOST_OF_A_CALLER, MOST_IN_ALL = 100, 5000
"""Watches. A process has one; a caller is an address."""
STATS_PERIOD_S = 1.0
OPTIONS = (
    ("grpc.so_reuseport", 0),
    # The loss of a caller's machine is detected within 30 s, and its watcher removed.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", 256 * 1024),
)


class Watcher:
    """What is still to be sent to one caller. Names alone: a caller that does not read keeps no states in memory."""

    def __init__(self, services: Iterable[str], name: str = "", address: str = "") -> None:
        self.services = tuple(dict.fromkeys(services))
        self.name = name
        self.address = address
        self._due: dict[str, None] = {}
        self._news = asyncio.Event()

    @property
    def due(self) -> tuple[str, ...]:
        """The services whose state is to be sent."""
        return tuple(self._due)

    def put(self, service: str) -> None:
        """Send the state that a service has by then."""
        self._due[service] = None
        self._news.set()

    async def take(self) -> str:
        """Wait for a service whose state is to be sent."""
        while not self._due:
            self._news.clear()
            await self._news.wait()
        service = next(iter(self._due))
        del self._due[service]
        return service


MOST_KNOWN = 100
"""Names of known services in the state of an unknown one."""


class DiscoveryState:
    """The current state of every service. One owner: the loop's thread."""

    def __init__(
        self,
        epoch: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        most_of_a_caller: int = MOST_OF_A_CALLER,
    ) -> None:
        self._most_of_a_caller = most_of_a_caller
        self._epoch = time.time_ns() if epoch is None else epoch
        self._clock = clock
        self._changed_at: dict[str, float] = {}
        """When each service's state last changed."""
        self._states: dict[str, discovery_pb2.ServiceEndpoints] = {}
        self.is_published = False
        """Whether anything was published yet; from then on the last state holds, even if the engine does not answer."""
        self._watchers: set[Watcher] = set()
        self._replica_at: dict[str, str] = {}
        """By address, the replica that has it."""

    @property
    def watchers(self) -> int:
        """The number of callers that watch."""
        return len(self._watchers)

    def callers(self) -> Mapping[str, frozenset[str]]:
        """The services that each caller watches, by the caller's name; callers without a name are left out, and a
        replica that has given another name than its own."""
        found: dict[str, frozenset[str]] = {}
        for watcher in self._watchers:
            if watcher.name and self._replica_at.get(watcher.address, watcher.name) == watcher.name:
                found[watcher.name] = found.get(watcher.name, frozenset()) | frozenset(watcher.services)
        return found

    def publish(self, endpoints: Mapping[str, discovery_pb2.ServiceEndpoints]) -> None:
        """Replace the state of all services, each with its complete list."""
        first, self.is_published = not self.is_published, True
        listed = (endpoint for service in endpoints.values() for endpoint in service.endpoints)
        self._replica_at = {_host(endpoint.address): endpoint.replica for endpoint in listed}
        changed = set()
        for service in sorted(set(endpoints) | set(self._states)):
            if self._take_over(service, endpoints.get(service)):
                changed.add(service)
        for watcher in self._watchers:
            for service in watcher.services:
                if first or service in changed:
                    watcher.put(service)

    def state(self, service: str) -> discovery_pb2.ServiceEndpoints:
        """Return a service's state; for a name that was never published: `unknown`, generation 0, the known names."""
        known = self._states.get(service)
        if known is not None:
            return known
        names = sorted(name for name, state in self._states.items() if not state.unknown)
        return discovery_pb2.ServiceEndpoints(
            service=service, epoch=self._epoch, unknown=True, known_services=names[:MOST_KNOWN]
        )

    def crowded(self, address: str) -> str:
        """Why a caller may not have another watch; "" = it may."""
        of_it = sum(watcher.address == address for watcher in self._watchers)
        if of_it >= self._most_of_a_caller:
            return f"{address} has {of_it} watches already; one is enough for all services of a process"
        if len(self._watchers) >= MOST_IN_ALL:
            return f"there are {MOST_IN_ALL} watches already, and more do not fit"
        return ""

    def watch(self, services: Iterable[str], name: str = "", address: str = "") -> Watcher:
        """Add a watcher and queue the current states, if any were published. End it with `leave`.

        `address`: where it is, without a port.
        """
        watcher = Watcher(services, name, address)
        self._watchers.add(watcher)
        if self.is_published:
            for service in watcher.services:
                watcher.put(service)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher."""
        self._watchers.discard(watcher)

    def _take_over(self, service: str, listed: discovery_pb2.ServiceEndpoints | None) -> bool:
        """Store a service's state; return whether it is to be sent."""
        old, now = self._states.get(service), self._clock()
        new = discovery_pb2.ServiceEndpoints(service=service, unknown=listed is None)
        if listed is not None:
            new.MergeFrom(listed)
        new.generation, new.epoch = old.generation if old else 0, self._epoch
        is_early = old is not None and now < self._changed_at[service] + STATS_PERIOD_S
        if new == old or (old is not None and is_early and _without_stats(old) == _without_stats(new)):
            return False
        new.generation += 1
        self._states[service] = new
        self._changed_at[service] = now
        return True


class DiscoveryServer(discovery_pb2_grpc.DiscoveryServicer):
    """Listens for callers. `port` is the one in use after `start` (asked for as 0: any)."""

    def __init__(self, discovery_state: DiscoveryState, host: str, port: int, store: Store | None = None) -> None:
        """`store`: what callers share; None = an empty one."""
        self._discovery_state = discovery_state
        self._server = grpc.aio.server(options=OPTIONS)
        discovery_pb2_grpc.add_DiscoveryServicer_to_server(self, self._server)
        add_store(MemoryStore() if store is None else store, self._server)
        self.port = self._server.add_insecure_port(f"{host}:{port}")

    async def start(self) -> None:
        """Start to accept calls."""
        await self._server.start()

    async def stop(self) -> None:
        """End all watches at once: callers keep their last list and reconnect."""
        await self._server.stop(grace=None)

    async def Watch(
        self,
        request: discovery_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[discovery_pb2.WatchRequest, discovery_pb2.ServiceEndpoints],
    ) -> AsyncIterator[discovery_pb2.ServiceEndpoints]:
        """Send the whole state at once, then at every change, until the caller disconnects."""
        problem = _problem(request)
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        address = _host(context.peer().partition(":")[2])  # ipv4:10.0.0.2:41234
        if crowded := self._discovery_state.crowded(address):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, crowded)
        watcher = self._discovery_state.watch(request.services, request.watcher, address)
        logger.debug("%s watches %s", request.watcher or context.peer(), ", ".join(watcher.services))
        try:
            while True:
                yield self._discovery_state.state(await watcher.take())
        finally:
            self._discovery_state.leave(watcher)


def _problem(request: discovery_pb2.WatchRequest) -> str:
    if not request.services:
        return "WatchRequest.services: expected at least one service name, found none"
    if len(request.services) > MOST_WATCHED:
        return f"WatchRequest.services: expected at most {MOST_WATCHED} names, found {len(request.services)}"
    if not all(request.services):
        return "WatchRequest.services: expected service names, found an empty one"
    if max(map(len, (*request.services, request.watcher))) > LONGEST_NAME:
        return f"WatchRequest: expected names of at most {LONGEST_NAME} characters"
    return ""


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _without_stats(state: discovery_pb2.ServiceEndpoints) -> discovery_pb2.ServiceEndpoints:
    bare = discovery_pb2.ServiceEndpoints()
    bare.CopyFrom(state)
    for endpoint in bare.endpoints:
        endpoint.ClearField("stats")
        endpoint.ClearField("stats_version")
    return bare
