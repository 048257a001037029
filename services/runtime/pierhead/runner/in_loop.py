"""A Runner in the running event loop: N replicas of each service, called by the others through lanes in memory."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from pierhead.calls.clients import Clients, Placed
from pierhead.calls.replica import Endpoint
from pierhead.classes.handles import handle_to
from pierhead.classes.service import Bound, serves_http
from pierhead.edge.grpc_server import SERVER_OPTIONS, register
from pierhead.edge.methods import pools_of
from pierhead.lanes.connection import Connection
from pierhead.lanes.in_memory import LocalReplica
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.reflection import JoinedPools
from pierhead.replica.server import ReplicaServer
from pierhead.runner.graph import check_routes, graph_of
from pierhead.runner.options import Options, listing_of, options_of, replicas_of, route_of, settings_of
from pierhead.runner.runner import PAUSE_S, Changed, FrontRoute, Offer
from pierhead.settings import Settings
from pierhead.tasks import end_tasks

logger = logging.getLogger("pierhead")


class LoopReplica:
    """One replica. It starts as it is made."""

    def __init__(self, bound: Bound, settings: Settings) -> None:
        self.name = settings.replica
        self.limit = settings.max_ongoing_requests
        self.service = bound.make(handle_to)
        self.server = ReplicaServer(self.service, settings=settings, metrics=RuntimeMetrics(), inside=True)
        self.local = LocalReplica(self.server.methods, self.server.edge)
        self.life = asyncio.create_task(self.server.run(), name=f"replica {self.name}")

    async def ready(self) -> None:
        """Return once it serves. Raises what keeps it from it."""
        ready = asyncio.create_task(self.server.ready.wait())
        try:
            await asyncio.wait([ready, self.life], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self.life.done():
            await self.life
        self.local.methods = self.server.methods

    async def ill(self) -> None:
        """Return once it is unhealthy, or has ended by itself."""
        ill = asyncio.create_task(self.server.ill.wait())
        try:
            await asyncio.wait([ill, self.life], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ill.cancel()

    async def stop(self, *, at_once: bool) -> None:
        """Drain, or end at once; returns when it has ended."""
        for _ in range(1 + at_once):
            self.server.stop()
        await asyncio.wait([self.life])
        if not self.life.cancelled():
            self.life.exception()  # told already, by `ready` or by the replica's log


class LoopService:
    """The replicas of one service, each replaced by another one when it is ill. An InProcess, for handles."""

    def __init__(self, bound: Bound, words: Options, settings: Settings, changed: Callable[[], object]) -> None:
        self.name = bound.name
        self.words = words
        self.settings = settings
        self.replicas: dict[str, LoopReplica] = {}
        """Those that are ready, by name."""
        self._bound = bound
        self._changed = changed
        self._starting: set[LoopReplica] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._keeping: list[asyncio.Task[None]] = []
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Return once all are ready. Raises what keeps one from it."""
        starts = [asyncio.create_task(self._start()) for _ in range(replicas_of(self.words))]
        try:
            started = await asyncio.gather(*starts)
        finally:
            await end_tasks(*starts)
        Clients.current().place(self.name, self._placed())
        self._keeping = [asyncio.create_task(self._keep(each), name=f"keeps {each.name}") for each in started]

    def connect(self, address: str, changed: Callable[[], None]) -> Connection:
        """See InProcess."""
        return self.replicas[address].local.connect(address, changed)

    def route(self) -> FrontRoute:
        """Its route. Only for a service that has one."""
        ports = ((each, each.server.http_port) for each in self.replicas.values())
        ends = [Endpoint(each.name, f"127.0.0.1:{port}", max_ongoing_requests=each.limit) for each, port in ports]
        return route_of(self.name, self.words, self.settings, ends)

    async def stop(self, *, at_once: bool) -> None:
        """End all of them; returns when they have ended."""
        await end_tasks(*self._keeping)
        alive = [*self.replicas.values(), *self._starting]
        await asyncio.gather(*(each.stop(at_once=at_once) for each in alive), *self._ending)
        self.replicas.clear()  # their objects are freed now: nothing else refers to them
        self._keeping.clear()
        self._starting.clear()
        await Clients.current().displace(self.name)

    async def _start(self) -> LoopReplica:
        name = f"{self.name}-{next(self._numbers)}"
        replica = LoopReplica(self._bound, settings_of(self.name, self.words, name))
        self._starting.add(replica)
        try:
            await replica.ready()
        finally:
            if replica.life.done() or replica.server.ready.is_set():
                self._starting.discard(replica)
        self.replicas[name] = replica
        return replica

    async def _keep(self, replica: LoopReplica) -> None:
        """Have another replica in its place whenever it is ill."""
        while True:
            await replica.ill()
            logger.error("%s is replaced: it is unhealthy, or has ended by itself", replica.name)
            del self.replicas[replica.name]
            self._show()
            ending = asyncio.create_task(replica.stop(at_once=False), name=f"ends {replica.name}")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            replica = await self._start_again()
            self._show()

    async def _start_again(self) -> LoopReplica:
        while True:
            try:
                return await self._start()
            except Exception:
                logger.exception("%s: a replica did not start; another one is tried in %g s", self.name, PAUSE_S)
            await asyncio.sleep(PAUSE_S)

    def _show(self) -> None:
        Clients.current().place(self.name, self._placed())
        self._changed()

    def _placed(self) -> Placed:
        """Itself for handles, with what Discovery would report of it."""
        ends = [Endpoint(each.name, each.name, max_ongoing_requests=each.limit) for each in self.replicas.values()]
        return Placed(self, listing_of(self.words, ends))


class LoopRunner:
    """A Runner."""

    def __init__(
        self, bound: Bound, written: Mapping[str, Options] | None = None, changed: Changed = lambda _: None
    ) -> None:
        """`written`: the words of a compose file, by service.

        Raises NoApplication for a graph that no stack could serve, NoWords for words that no service can have.
        """
        self.graph = graph_of(bound)
        words = {name: options_of(each, written or {}) for name, each in self.graph.items()}
        settings = {name: settings_of(name, each) for name, each in words.items()}
        check_routes(words, {name: serves_http(each.cls) for name, each in self.graph.items()})
        self._changed = changed
        self.services = {
            name: LoopService(each, words[name], settings[name], self._show) for name, each in self.graph.items()
        }
        """Callers before their callees."""
        self._started: list[LoopService] = []
        self._grpc = _GrpcServer()

    async def start(self) -> Offer:
        """See Runner."""
        try:
            for service in reversed(self.services.values()):
                self._started.append(service)
                await service.start()
            await self._grpc.start(list(self.services.values()))
        except BaseException:
            await self.stop(at_once=True)
            raise
        return self._offer()

    @property
    def most_ongoing(self) -> int:
        """Requests that all replicas together work on at a time."""
        return sum(each.settings.max_ongoing_requests * replicas_of(each.words) for each in self.services.values())

    def ready(self) -> Mapping[str, int]:
        """See Runner."""
        return {name: len(service.replicas) for name, service in self.services.items()}

    async def stop(self, *, at_once: bool = False) -> None:
        """See Runner."""
        longest = max(service.settings.drain_timeout_s for service in self.services.values())
        await self._grpc.stop(0 if at_once else longest)
        for service in reversed(self._started):
            await service.stop(at_once=at_once)
        self._started.clear()

    def _offer(self) -> Offer:
        routes = [each.route() for each in self.services.values() if "route" in each.words]
        return Offer(routes, self._grpc.port, dict.fromkeys(self._grpc.services, ""))

    def _show(self) -> None:
        self._changed(self._offer())


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
        self._of: dict[LoopReplica, _Handlers] = {}
        self.names = self._handlers(next(iter(service.replicas.values()))).names

    def service(self, handler_call_details: Any) -> Any:
        replicas = self._service.replicas.values()
        if not replicas:
            return None
        chosen = min(replicas, key=lambda each: each.server.edge.admission.ongoing)
        return self._handlers(chosen).find(handler_call_details.method)

    def _handlers(self, replica: LoopReplica) -> _Handlers:
        for gone in self._of.keys() - set(self._service.replicas.values()):
            del self._of[gone]
        found = self._of.get(replica)
        if found is None:
            found = self._of[replica] = _Handlers(replica)
        return found


class _Handlers:
    """The handlers of one replica, registered here as at a server."""

    def __init__(self, replica: LoopReplica) -> None:
        self._by_path: dict[str, Any] = {}
        server: Any = self
        self.names = register(replica.server.methods, server, replica.server.edge)

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Does nothing: the other method gets the same handlers with their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See grpc.Server."""
        self._by_path |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def find(self, path: str) -> Any:
        """The handler of a method, if it is one of these."""
        return self._by_path.get(path)
