"""Real HAProxys on two nodes: who may drive them, which controller they obey, and what each keeps by itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from dataclasses import replace

import pytest
from aiohttp import ClientConnectionError

from controller.errors import RoutingError, RoutingUnreachable
from controller.model.actions import AddServer, SetServerState, SetWaitingRoom
from controller.model.world import ServerState
from controller.routing import haproxy_config
from controller.routing.haproxy_config import Tls
from controller.routing.haproxy_text import epoch_of
from controller.routing.haproxy_tokens import Tokens
from controller.settings import TokenRules
from controller.swarm.edges.router import RUNTIME_PORT
from controller.swarm.edges.routes import PublishedRoutes
from controller.swarm.up.operator_files import named
from tests.harness import tokens
from tests.harness.certificates import made
from tests.harness.edge import Replica, observe, service, with_probe_port, write_routes
from tests.harness.edge_nodes import EPOCH, Nodes
from tests.harness.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

ECHO = service("echo", max_ongoing_requests=10)
BACKEND = "svc_echo"


def add(name: str) -> AddServer:
    return AddServer(target=name, backend=BACKEND, address="127.0.0.1:9", spec=ECHO)


async def test_who_may_drive_an_edge(nodes: Nodes) -> None:
    assert (await nodes.process("n1").observe()).routing_hash
    for role in ("rogue", "edge"):
        with pytest.raises(RoutingUnreachable):
            await nodes.process("n1", role=role).observe()
    address = (nodes.containers["n1"].ip, RUNTIME_PORT)
    with socket.create_connection(address, 5) as plain:
        plain.sendall(b"show info\n")
        assert plain.recv(100) == b""
    assert answer_without_certificate(address, ssl.create_default_context(cafile=nodes.tls / "ca.pem")) == b""


def answer_without_certificate(address: tuple[str, int], tls: ssl.SSLContext) -> bytes:
    with (
        contextlib.suppress(ssl.SSLError, ConnectionError),
        socket.create_connection(address, 5) as plain,
        tls.wrap_socket(plain, server_hostname="1.edge.pierhead.internal") as unknown,
    ):
        unknown.sendall(b"show info\n")
        return unknown.recv(100)
    return b""


async def test_an_edge_obeys_the_newest_controller_also_after_a_restart(nodes: Nodes) -> None:
    await write_routes(nodes.router, ECHO)
    successor = nodes.successor(EPOCH + 1)
    successor.routing_hash([ECHO])
    await observe(successor)
    with pytest.raises(RoutingUnreachable):
        await nodes.router.perform(SetWaitingRoom(target="echo", backend=BACKEND, is_open=False))
    with pytest.raises(RoutingUnreachable):
        await nodes.router.observe()
    assert (await observe(successor)).closed == frozenset()
    file = nodes.containers["n1"].run_dir / "haproxy.cfg"

    async def kept() -> bool:
        return epoch_of(file.read_text()) == EPOCH + 1

    await until(kept, "the edge has the epoch in its file")
    nodes.containers["n1"].kill_and_wait()
    with pytest.raises(RoutingUnreachable):
        await nodes.process("n1").observe()
    await successor.close()


async def test_an_edge_without_a_controller_serves_its_last_file_and_is_brought_up_again(nodes: Nodes) -> None:
    await write_routes(nodes.router, ECHO)
    await nodes.router.perform(add("echo-1"))
    away = nodes.containers["n2"]
    for _ in range(3):
        await observe(nodes.router)

    async def listed() -> object:
        file = (away.run_dir / "haproxy.cfg").read_text()
        return re.search(r"^ +server echo-1 127\.0\.0\.1:9 id 1 .* maxconn 5$", file, re.MULTILINE)

    await until(listed, "the file of n2 lists the server with its share")
    away.kill_and_wait()
    own = nodes.process("n2")
    assert [(one.name, one.limit) for one in (await own.observe()).servers] == [("echo-1", 5)]
    await own.perform(SetServerState(target="echo-1", backend=BACKEND, state=ServerState.MAINT))

    async def partly() -> bool:
        state = await nodes.router.observe()
        return [one.state for one in state.servers] == [ServerState.PARTLY]

    await until(partly, "n2 is seen again")
    assert nodes.router.odd_edges.keys() == {"n2"}
    await nodes.router.perform(SetServerState(target="echo-1", backend=BACKEND, state=ServerState.READY))
    assert [one.state for one in (await observe(nodes.router)).servers] == [ServerState.READY]
    assert nodes.router.odd_edges == {}


async def test_routes_that_are_refused_change_nothing_at_any_edge(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_routes(nodes.router, ECHO)
    before, render = await observe(nodes.router), haproxy_config.render
    pids = {name: (await nodes.process(name).observe()).pid for name in nodes.containers}
    with monkeypatch.context() as patch:
        patch.setattr(haproxy_config, "render", lambda *a, **k: f"{render(*a, **k)}unheard-of keyword\n")
        with pytest.raises(RoutingError, match=r"edge n1: it refuses the routes: .*(?s:.*)unheard-of.*(?s:.*)edge n2"):
            await write_routes(nodes.router, ECHO, service("other"))
    assert replace(await observe(nodes.router), routing_hash=before.routing_hash) == before
    assert {name: (await nodes.process(name).observe()).pid for name in nodes.containers} == pids
    await write_routes(nodes.router, ECHO, service("third"))
    assert (await observe(nodes.router)).backends == {BACKEND, "svc_third"}


async def test_routes_of_an_older_controller_are_not_taken(nodes: Nodes) -> None:
    await write_routes(nodes.router, ECHO)
    successor = nodes.successor(EPOCH + 1)
    await observe(successor)
    assert isinstance(nodes.routes, PublishedRoutes)
    nodes.routes.publish(haproxy_config.render([service("other")], is_remote=True))

    async def told() -> bool:
        return nodes.routes.refusals().keys() == {"n1", "n2"}

    await until(told, "both edges say that they obey another controller", within_s=60)
    assert f"epoch {EPOCH + 1}" in nodes.routes.refusals()["n1"]
    assert (await observe(successor)).backends == {BACKEND}
    await successor.close()


async def test_an_edge_that_is_stopped_says_so_first_and_finishes_what_it_has_begun(nodes: Nodes) -> None:
    """A balancer in front of the edges has some seconds to choose another one, in which no request fails."""
    leaving = nodes.containers["n1"]
    async with contextlib.AsyncExitStack() as ends:
        replica = Replica(leaving.gateway, "echo-1")
        await replica.start()
        ends.push_async_callback(replica.stop)
        ends.callback(replica.let_go.set)
        await write_routes(nodes.router, ECHO)
        spec = with_probe_port(ECHO, replica.port)
        await nodes.router.perform(replace(add("echo-1"), address=replica.address, spec=spec))
        assert [await nodes.status(name, "/-/healthz") for name in ("n1", "n2")] == [200, 200]
        held = asyncio.ensure_future(nodes.http.post(f"http://{leaving.ip}:8000/echo/hold"))
        await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
        stopping = asyncio.ensure_future(asyncio.to_thread(leaving.end))

        async def says_so() -> bool:
            return await nodes.status("n1", "/-/healthz") == 503

        async def refuses() -> bool:
            with contextlib.suppress(ClientConnectionError):
                assert await nodes.status("n1", "/echo") == 200, "it serves for as long as it takes connections"
                return False
            return True

        await until(says_so, "n1 says that it leaves")
        assert await nodes.status("n2", "/-/healthz") == 200
        await until(refuses, "n1 refuses connections")
        replica.let_go.set()
        assert (await held).status == 200
        assert await stopping == 0


async def test_edges_speak_tls_and_check_tokens_with_the_files_that_swarm_gave_them(nodes: Nodes) -> None:
    key, before, others = (tokens.made() for _ in range(3))
    nodes.put("tls/a.pem", *made("a.test", now=time.time()))
    keys = named(map(tokens.public, (key, before)))
    for name, text in keys.items():
        nodes.put(f"jwt/{name}", text)
    tls, of_tokens = Tls("/run/secrets/tls", 18443), Tokens(TokenRules(), "/run/secrets/jwt", tuple(sorted(keys)))
    router = nodes.with_files(tls, of_tokens)
    closed = replace(ECHO, auth="jwt")
    await write_routes(router, closed, service("open"))
    claims = {"exp": time.time() + 3600}
    expected = {tokens.token(key, claims): 503, tokens.token(before, claims): 503, tokens.token(others, claims): 401}
    for container in nodes.containers.values():
        async with nodes.http.get(f"http://{container.ip}:8000/echo", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["location"]) == (308, f"https://{container.ip}:18443/echo")
        for token, status in {**expected, "": 401}.items():
            headers = {"authorization": f"Bearer {token}"}
            async with nodes.http.get(f"https://{container.ip}:8443/echo", ssl=False, headers=headers) as answer:
                assert answer.status == status, "503: let in, and there is no replica"
    await router.close()


async def test_an_edge_without_its_certificates_keeps_the_routes_that_it_has(nodes: Nodes) -> None:
    await write_routes(nodes.router, ECHO)
    router = nodes.with_files(Tls("/run/secrets/tls", 18443))
    with pytest.raises(RoutingError, match=r"edge n1: it refuses the routes: .*(?s:.*)/run/secrets/tls"):
        await write_routes(router, ECHO)
    for container in nodes.containers.values():
        async with nodes.http.get(f"http://{container.ip}:8000/echo", allow_redirects=False) as answer:
            assert answer.status == 503, "it is still the service's route, without a replica"
    await router.close()
