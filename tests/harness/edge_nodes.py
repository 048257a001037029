"""Two HAProxys as on two nodes: each with its own volume, driven over TLS, with the program that fetches its routes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from aiohttp import ClientSession, TCPConnector

from controller.model.world import EdgePlace
from controller.routing.haproxy_config import Tls
from controller.routing.haproxy_process import HAProxyProcess
from controller.routing.haproxy_tokens import NO_KEYS, Tokens
from controller.swarm import certificates
from controller.swarm.edges import router as edges
from controller.swarm.edges.router import EdgesRouter, over_tls
from controller.swarm.edges.routes import PublishedRoutes
from tests.harness import certificates as certificates_of_operator
from tests.harness.haproxy_container import HAProxyContainer
from tests.harness.waiting import PATIENCE_S

EPOCH = 5


@dataclass
class Nodes:
    """The nodes by name; `tls` has ca.pem and a file of each role, also of one that an unknown authority signed."""

    tls: Path
    containers: Mapping[str, HAProxyContainer]
    routes: PublishedRoutes
    router: EdgesRouter
    http: ClientSession

    def process(self, name: str, epoch: int = EPOCH, role: str = "controller") -> HAProxyProcess:
        """A node's HAProxy as a controller with this certificate reaches it."""
        context = certificates.context(self.tls / f"{role}.pem", self.tls / "ca.pem", is_server=False)
        return over_tls(context, epoch)(self.containers[name].ip)

    def successor(self, epoch: int) -> EdgesRouter:
        """The router of another controller, which publishes nothing."""
        context = certificates.context(self.tls / "controller.pem", self.tls / "ca.pem", is_server=False)
        return EdgesRouter(self.find, over_tls(context, epoch), PublishedRoutes(epoch))

    def with_files(self, tls: Tls, tokens: Tokens = NO_KEYS) -> EdgesRouter:
        """The router of a controller whose edges have files of the operator."""
        context = certificates.context(self.tls / "controller.pem", self.tls / "ca.pem", is_server=False)
        return EdgesRouter(self.find, over_tls(context, EPOCH), self.routes, tls=tls, tokens=tokens)

    def put(self, path: str, *texts: str) -> None:
        """As Swarm has a secret there."""
        certificates_of_operator.write(self.tls / path, *texts)

    async def find(self) -> Mapping[str, EdgePlace]:
        return {name: EdgePlace(container.ip) for name, container in self.containers.items()}

    async def status(self, name: str, path: str) -> int:
        async with self.http.get(f"http://{self.containers[name].ip}:8000{path}") as answer:
            return answer.status


def make_certificates(directory: Path) -> None:
    """ca.pem, edge.pem, controller.pem, and rogue.pem of another authority."""
    now = time.time()
    authority = certificates.make_authority(now)
    made = {
        "ca": authority.certificate,
        "edge": certificates.make("edge", authority, now).pem,
        "controller": certificates.make("controller", authority, now).pem,
        "rogue": certificates.make("controller", certificates.make_authority(now), now).pem,
    }
    for name, text in made.items():
        (directory / f"{name}.pem").write_text(text)


@contextlib.asynccontextmanager
async def two_nodes(image: str) -> AsyncIterator[Nodes]:
    """Start them; each finds the controller of this process. An edge of a busy machine is not away."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(patch.object(edges, "ANSWER_S", PATIENCE_S))
        directory = Path(tempfile.mkdtemp(prefix="pierhead-nodes-"))
        stack.callback(shutil.rmtree, directory)
        tls = directory / "secrets"
        tls.mkdir()
        make_certificates(tls)
        routes, containers = PublishedRoutes(EPOCH), {}
        server = certificates.context(tls / "controller.pem", tls / "ca.pem", is_server=True)
        port = await stack.enter_async_context(routes.serving("0.0.0.0", 0, server))
        for name in ("n1", "n2"):
            (directory / name).mkdir()
            hosts = {"controller": "host-gateway"}
            running = containers[name] = HAProxyContainer(directory / name, image, extra_hosts=hosts)
            running.with_volume_mapping(tls, "/run/secrets")
            running.with_envs(PIERHEAD_NODE=name, PIERHEAD_CONTROLLER=f"controller:{port}")
            await asyncio.to_thread(running.__enter__)
            # Outside the loop, which thus sees the end of the edge's connections before it stops serving.
            stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)
        http = await stack.enter_async_context(ClientSession(connector=TCPConnector(force_close=True)))
        client = certificates.context(tls / "controller.pem", tls / "ca.pem", is_server=False)
        nodes = Nodes(tls, containers, routes, None, http)  # type: ignore[arg-type]
        nodes.router = EdgesRouter(nodes.find, over_tls(client, EPOCH), routes)
        stack.push_async_callback(nodes.router.close)
        yield nodes
