"""All services of a graph in one event loop: one replica of each, called by the others through lanes in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from pierhead.calls.clients import Clients, Placed
from pierhead.calls.listing import Listing
from pierhead.calls.replica import Endpoint
from pierhead.classes.handles import handle_to
from pierhead.classes.service import Bound, serves_http
from pierhead.dev.front import FrontRoute, route_of
from pierhead.dev.words import Words, settings_of, words_of
from pierhead.edge.grpc_server import SERVER_OPTIONS, register
from pierhead.edge.methods import pools_of
from pierhead.lanes.in_memory import LocalReplica
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.reflection import JoinedPools
from pierhead.replica.server import ReplicaServer
from pierhead.settings import Settings


class NoApplication(Exception):
    """A graph that cannot be served; the message says why."""


class Running:
    """One service that runs."""

    def __init__(self, bound: Bound, words: Words, settings: Settings) -> None:
        self.name = bound.name
        self.words = words
        self.settings = settings
        self.service = bound.make(handle_to)
        self.server = ReplicaServer(self.service, settings=settings, metrics=RuntimeMetrics(), inside=True)
        self.life = asyncio.create_task(self.server.run(), name=f"replica of {self.name}")

    async def ready(self) -> None:
        """Return once it serves. Raises what keeps it from it."""
        ready = asyncio.create_task(self.server.ready.wait())
        try:
            await asyncio.wait([ready, self.life], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self.life.done():
            await self.life

    async def stop(self, *, at_once: bool) -> None:
        """Drain, or end at once; returns when it has ended."""
        for _ in range(1 + at_once):
            self.server.stop()
        await asyncio.wait([self.life])
        if not self.life.cancelled():
            self.life.exception()  # told already, by `ready` or by the replica's log

    def placed(self) -> Placed:
        """Itself for handles, with what Discovery would report of it."""
        router = self.words.get("router", {})
        kwargs = router.get("policy_kwargs")
        listing = Listing(
            [Endpoint(self.name, "local", max_ongoing_requests=self.settings.max_ongoing_requests)],
            max_queued_requests=self.words.get("max_queued_requests"),
            policy=router.get("policy"),
            policy_kwargs=json.dumps(kwargs) if kwargs else "",
        )
        return Placed(LocalReplica(self.server.methods, self.server.edge), listing)

    def route(self) -> FrontRoute:
        """Its route. Only for a service that has one."""
        port = self.server.http_port
        assert port is not None  # noqa: S101 - checked before it was started
        return route_of(self.name, self.words, self.settings, port)


class RunningApplication:
    """Starts and ends the services of a graph in the running loop."""

    def __init__(self, bound: Bound, written: Mapping[str, Words] | None = None) -> None:
        """`written`: the words of a compose file, by service.

        Raises NoApplication for a graph that no stack could serve, NoWords for words that no service can have.
        """
        self.graph = graph_of(bound)
        self._words = {name: words_of(each, written or {}) for name, each in self.graph.items()}
        self._settings = {name: settings_of(name, words) for name, words in self._words.items()}
        check_routes(self._words, {name: serves_http(each.cls) for name, each in self.graph.items()})
        self._running: list[Running] = []
        self._grpc: grpc.aio.Server | None = None
        self.grpc_port: int | None = None
        """Where all methods are served by plain gRPC; None without methods."""
        self.grpc_services: list[str] = []

    async def start(self) -> None:
        """Start the services, callees first. Raises what a constructor or a check raises; then nothing runs."""
        try:
            for name in reversed(self.graph):
                running = Running(self.graph[name], self._words[name], self._settings[name])
                self._running.append(running)
                await running.ready()
                Clients.current().place(name, running.placed())
            await self._listen_grpc()
        except BaseException:
            await self.stop(at_once=True)
            raise

    @property
    def most_ongoing(self) -> int:
        """Requests that all services together work on at a time."""
        return sum(settings.max_ongoing_requests for settings in self._settings.values())

    def routes(self) -> Sequence[FrontRoute]:
        """The routes, each with a line of its own."""
        return [each.route() for each in self._running if "route" in each.words]

    async def stop(self, *, at_once: bool = False) -> None:
        """End the services, callers first; unless `at_once`, each when its requests have ended."""
        if self._grpc is not None:
            longest = max(settings.drain_timeout_s for settings in self._settings.values())
            await self._grpc.stop(0 if at_once else longest)
            self._grpc = None
        for running in reversed(self._running):
            await running.stop(at_once=at_once)
        for running in self._running:
            await Clients.current().displace(running.name)
        self._running.clear()

    async def _listen_grpc(self) -> None:
        """One server for the methods of all services, each behind its own edge, and reflection."""
        speaking = [each for each in self._running if each.server.methods]
        if not speaking:
            return
        server = grpc.aio.server(options=SERVER_OPTIONS)
        for each in speaking:
            self.grpc_services += register(each.server.methods, server, each.server.edge)
        services: list[Any] = [each.service for each in speaking]
        names = (*self.grpc_services, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, JoinedPools(pools_of(services)))
        self.grpc_port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._grpc = server


def graph_of(bound: Bound) -> dict[str, Bound]:
    """The services of an application. Raises NoApplication."""
    try:
        return bound.graph()
    except ValueError as error:
        raise NoApplication(str(error)) from None


def check_routes(words: Mapping[str, Words], has_http: Mapping[str, bool]) -> None:
    """Raise NoApplication for two services of one route, a route that is no path, and one that no HTTP answers."""
    owners: dict[str, str] = {}
    for name, block in words.items():
        route = block.get("route")
        if route is None:
            continue
        if not str(route).startswith("/"):
            raise NoApplication(f'{name}: x-serve.route: expected a path that starts with "/", found "{route}"')
        owner = owners.setdefault(route, name)
        if owner != name:
            raise NoApplication(f"{owner} and {name} have the same route, {route}; one of them needs another one")
        if not has_http[name]:
            raise NoApplication(
                f"{name} has the route {route} and answers no HTTP: give its class an ASGI application (asgi=) or "
                "methods with @endpoint, or remove the route"
            )
