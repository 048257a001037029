"""A Runner in the running event loop: N replicas of each service, called by the others through lanes in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from pierhead.calls.absence import stopped
from pierhead.calls.clients import Clients, Placed
from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.classes.handles import handle_to
from pierhead.classes.service import Bound, serves_http
from pierhead.edge.grpc_server import SERVER_OPTIONS, guarded
from pierhead.edge.methods import pools_of
from pierhead.lanes.connection import Connection
from pierhead.lanes.in_memory import LocalReplica
from pierhead.metrics import RuntimeMetrics
from pierhead.raised import is_answerable
from pierhead.replica.reflection import JoinedPools
from pierhead.replica.server import LAST_STATUS_S, ReplicaServer
from pierhead.routing_stats import Published, Stats
from pierhead.runner.graph import check_routes, graph_of
from pierhead.runner.keeper import ReplicaKeeper, all_of
from pierhead.runner.options import Options, listing_of, options_of, replicas_of, route_of, settings_of
from pierhead.runner.runner import Changed, FrontRoute, Offer
from pierhead.settings import Settings

Adapt = Callable[[str, Settings], Settings]
"""A service's name and the settings of its words -> the settings of its replicas."""


class LoopReplica:
    """A KeptReplica."""

    def __init__(self, bound: Bound, settings: Settings, told: Callable[[], object]) -> None:
        """`told`: called whenever it publishes other numbers."""
        self.limit = settings.max_ongoing_requests
        self.service = bound.make(handle_to)
        own = self.service.__reports__
        self.name = own.name if own is not None and own.name else settings.replica
        settings = replace(settings, replica=self.name)
        self.server = ReplicaServer(self.service, settings=settings, metrics=RuntimeMetrics(), inside=True)
        self._stats: Published | None = None
        if own is not None:
            self.server.edge.reports = own
            self._stats = own.stats
            self._stats.changed = told
        self.local = LocalReplica(self.server.methods, self.server.edge)
        self.life = asyncio.create_task(self.server.run(), name=f"replica {self.name}")

    async def ready(self) -> None:
        """See KeptReplica."""
        await self._until(self.server.ready)
        if self.life.done():
            await self.life
        self.local.methods = self.server.methods

    def endpoint(self, address: str) -> Endpoint:
        """Where it is, with its own numbers."""
        stats = None if self._stats is None else Stats(self._stats.version, self._stats.numbers)
        return Endpoint(self.name, address, max_ongoing_requests=self.limit, stats=stats)

    async def ill(self) -> None:
        """See KeptReplica."""
        await self._until(self.server.ill)

    async def stop(self, *, at_once: bool) -> None:
        """See KeptReplica."""
        for _ in range(1 + at_once):
            self.server.stop()
        await asyncio.wait([self.life])
        if not self.life.cancelled():
            self.life.exception()  # told already, by `ready` or by the replica's log

    async def _until(self, event: asyncio.Event) -> None:
        """Return once it is set, or the replica has ended."""
        waiting = asyncio.create_task(event.wait())
        try:
            await asyncio.wait([waiting, self.life], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()


class LoopService(ReplicaKeeper[LoopReplica]):
    """The replicas of one service. An InProcess, for handles."""

    def __init__(
        self, bound: Bound, words: Options, adapt: Adapt, tries: int, changed: Callable[[LoopService], object]
    ) -> None:
        super().__init__(bound.name, words, changed, tries)
        self.settings = adapt(self.name, settings_of(self.name, words))
        self._bound = bound
        self._adapt = adapt
        self._has_stopped = False

    def make(self, name: str) -> LoopReplica:
        """See ReplicaKeeper."""
        settings = self._adapt(self.name, settings_of(self.name, self.words, name))
        return LoopReplica(self._bound, settings, self.place)

    def connect(self, address: str, changed: Callable[[], None]) -> Connection:
        """See InProcess."""
        return self.replicas[address].local.connect(address, changed)

    def route(self) -> FrontRoute:
        """Its route. Only for a service that has one."""
        ports = ((each, each.server.http_port) for each in self.replicas.values())
        ends = [each.endpoint(f"127.0.0.1:{port}") for each, port in ports]
        return route_of(self.name, self.words, self.settings, ends)

    def place(self) -> None:
        """Send this loop's calls to its replicas, with what Discovery would report of them; where there is none yet,
        they wait.
        """
        ends = [each.endpoint(each.name) for each in self.replicas.values()]
        listing = ReplicaListing(absence=stopped) if self._has_stopped else listing_of(self.words, ends)
        Clients.current().place(self.name, Placed(self, listing))

    async def stop(self, *, at_once: bool) -> None:
        """See ReplicaKeeper. Calls that wait fail, and so do later ones."""
        self._has_stopped = True
        self.place()
        await super().stop(at_once=at_once)
        with suppress(TimeoutError):  # their calls have ended by now; callers are to know it
            async with asyncio.timeout(LAST_STATUS_S):
                await Clients.current().drained(self.name)


class LoopRunner:
    """A Runner."""

    def __init__(
        self,
        bound: Bound,
        written: Mapping[str, Options] | None = None,
        changed: Changed = lambda _: None,
        *,
        adapt: Adapt = lambda _, settings: settings,
        tries: int = 1,
    ) -> None:
        """`written`: the words of a compose file, by service; `adapt`: what a service's settings become; `tries`: how
        often a first replica is tried.

        Raises NoApplication for a graph that no stack could serve, NoOptions for words that no service can have.
        """
        self.graph = graph_of(bound)
        words = {name: options_of(each, written or {}) for name, each in self.graph.items()}
        check_routes(words, {name: serves_http(each.cls) for name, each in self.graph.items()})
        self._changed = changed
        self.services = {
            name: LoopService(each, words[name], adapt, tries, self._show) for name, each in self.graph.items()
        }
        """Callers before their callees."""
        self._has_started = False
        self._grpc = _GrpcServer()

    def place(self) -> None:
        """Let calls wait for replicas, before the start."""
        for service in self.services.values():
            service.place()

    async def start(self) -> Offer:
        """See Runner."""
        self.place()
        try:
            await all_of(each.start() for each in reversed(self.services.values()))
            await self._grpc.start(list(self.services.values()))
        except BaseException:
            await self.stop(at_once=True)
            raise
        self._has_started = True
        return self._offer()

    async def start_each(self) -> Mapping[str, BaseException]:
        """As `start`, each service alone, without gRPC; returns what keeps services from it: calls of them fail."""
        self.place()
        return {name: why for name, why in await asyncio.gather(*map(_started_alone, self.services.values())) if why}

    @property
    def most_ongoing(self) -> int:
        """Requests that all replicas together work on at a time."""
        return sum(each.settings.max_ongoing_requests * replicas_of(each.words) for each in self.services.values())

    def ready(self) -> Mapping[str, int]:
        """See Runner."""
        return {name: len(service.replicas) for name, service in self.services.items()}

    async def stop(self, *, at_once: bool = False, in_turn: bool = True) -> None:
        """See Runner. Without `in_turn` callees do not wait for their callers' end."""
        self._has_started = False
        longest = max(service.settings.drain_timeout_s for service in self.services.values())
        await self._grpc.stop(0 if at_once else longest)
        for together in [[each] for each in self.services.values()] if in_turn else [list(self.services.values())]:
            await asyncio.gather(*(each.stop(at_once=at_once) for each in together))
        for name in self.services:
            await Clients.current().displace(name)

    def _offer(self) -> Offer:
        routes = [each.route() for each in self.services.values() if "route" in each.words]
        return Offer(routes, self._grpc.port, dict.fromkeys(self._grpc.services, ""))

    def _show(self, service: LoopService) -> None:
        service.place()
        if self._has_started:
            self._changed(self._offer())


async def _started_alone(service: LoopService) -> tuple[str, BaseException | None]:
    try:
        await service.start()
    except BaseException as error:
        if not is_answerable(error):
            raise
        await service.stop(at_once=True)
        return service.name, error
    return service.name, None


class _GrpcServer:
    """All methods of an application by plain gRPC on one port, each behind the edge of its replica, and reflection."""

    def __init__(self) -> None:
        self.port: int | None = None
        self.services: list[str] = []
        self._server: grpc.aio.Server | None = None

    async def start(self, services: Sequence[LoopService]) -> None:
        """Listen, unless there are no methods."""
        speaking = [each for each in services if any(replica.server.methods for replica in each.replicas.values())]
        if not speaking:
            return
        self._server = server = grpc.aio.server(options=SERVER_OPTIONS)
        for service in speaking:
            spread = _Spread(service)
            self.services += spread.names
            server.add_generic_rpc_handlers((spread,))
        names = (*self.services, reflection.SERVICE_NAME)
        objects: list[Any] = [next(iter(each.replicas.values())).service for each in speaking]
        reflection.enable_server_reflection(names, server, JoinedPools(pools_of(objects)))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None


class _Spread(grpc.GenericRpcHandler):
    """Finds the handler of a call at the least busy replica of a service."""

    def __init__(self, service: LoopService) -> None:
        self._service = service
        self._of: dict[LoopReplica, Mapping[str, Mapping[str, Any]]] = {}
        self.names = list(self._handlers(next(iter(service.replicas.values()))))

    def service(self, handler_call_details: Any) -> Any:
        replicas = self._service.replicas.values()
        if not replicas:
            return None
        chosen = min(replicas, key=lambda each: each.server.edge.admission.ongoing)
        service, _, method = handler_call_details.method[1:].rpartition("/")
        return self._handlers(chosen).get(service, {}).get(method)

    def _handlers(self, replica: LoopReplica) -> Mapping[str, Mapping[str, Any]]:
        for gone in self._of.keys() - set(self._service.replicas.values()):
            del self._of[gone]
        if replica not in self._of:
            self._of[replica] = guarded(replica.server.methods, replica.server.edge)
        return self._of[replica]
