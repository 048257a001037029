"""Edges in memory, for tests of the router of many edges."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from controller.errors import RoutingUnreachable
from controller.model.actions import AddServer, SetServerWeight, SetWaitingRoom, WriteRouting
from controller.model.world import EdgePlace
from controller.routing.base import RoutingAction
from controller.routing.haproxy_socket import CommandRefused
from controller.routing.haproxy_text import hash_of
from controller.swarm.edges.router import EdgesRouter
from controller.swarm.edges.routes import PublishedRoutes
from tests.fakes.fake_router import FakeRouter


@dataclass
class FakeEdge(FakeRouter):
    """One edge: `HAProxyProcess` in memory. `up` = it answers."""

    takes_routes: bool = True

    @property
    def runtime(self) -> FakeEdge:
        return self

    async def perform(self, action: RoutingAction) -> None:
        if not self.up:
            raise RoutingUnreachable("it is away")
        place = (getattr(action, "backend", ""), action.target)
        if isinstance(action, AddServer | SetWaitingRoom) and action.backend not in self.backends:
            raise CommandRefused(action.words, "No such backend.")
        if isinstance(action, SetServerWeight) and place not in self.servers:
            raise CommandRefused(action.words, "No such server.")
        await super().perform(action)
        if isinstance(action, AddServer):
            limit = action.spec.max_ongoing_requests
            self.servers[place] = replace(self.servers[place], limit=limit)

    async def ask_all(self, commands: Sequence[str]) -> list[str]:
        for words in map(str.split, commands):
            assert words[:3] == ["set", "maxconn", "server"]
            backend, _, name = words[3].partition("/")
            self.servers[backend, name] = replace(self.servers[backend, name], limit=int(words[4]))
        return []


class FakeEdges(PublishedRoutes):
    """The edges, and the routes that those fetch that are up."""

    def __init__(self, names: Sequence[str] = ("n1", "n2", "n3")) -> None:
        super().__init__(epoch=1)
        self.edges = {name: FakeEdge(answers=lambda name: False) for name in names}
        self.leaving: set[str] = set()
        """Those that were stopped."""
        self.services: WriteRouting | None = None

    def router(self) -> EdgesRouter:
        return EdgesRouter(self.find, lambda name: self.edges[name], self)  # type: ignore[arg-type,return-value]

    async def find(self) -> Mapping[str, EdgePlace]:
        await asyncio.sleep(0)
        return {name: EdgePlace(name, name in self.leaving) for name in self.edges}

    def publish(self, text: str) -> None:
        super().publish(text)
        self.fetch()

    def fetch(self) -> None:
        """Every edge that is up takes what is published."""
        backends = frozenset(line.split()[1] for line in self.text.splitlines() if line.startswith("backend svc_"))
        for edge in self.edges.values():
            if edge.up and edge.takes_routes and self.text and edge.hash != hash_of(self.text):
                edge.hash, edge.backends = hash_of(self.text), backends
                edge.closed.clear()
                for place in [place for place in edge.servers if place[0] not in backends]:
                    del edge.servers[place]
