"""What every router does: one real HAProxy, two of them on two nodes, and the fakes that the controller's tests use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.errors import RoutingError
from controller.model.actions import (
    AddServer,
    DeleteServer,
    SetServerState,
    SetServerWeight,
    SetWaitingRoom,
    ShutdownSessions,
    WriteKeys,
)
from controller.model.keys import KeySet, ServiceKey, digest_of
from controller.model.world import Server, ServerState
from controller.routing.base import Router
from controller.routing.haproxy import HAProxyRouter
from tests.fakes.fake_edges import FakeEdges
from tests.fakes.fake_router import FakeRouter
from tests.harness.edge import Edge, observe, service, write_routes
from tests.harness.edge_nodes import Nodes

ECHO, OTHER = service("echo"), service("other")
BACKEND, ADDRESS = "svc_echo", "127.0.0.1:9"


REAL = [pytest.param(name, marks=pytest.mark.engine) for name in ("haproxy", "two nodes")]


@pytest.fixture(params=["fake", "fakes", *REAL])
def router(request: pytest.FixtureRequest) -> Router:
    if request.param == "fake":
        return FakeRouter(answers=lambda name: False)
    if request.param == "fakes":
        return FakeEdges().router()
    if request.param == "two nodes":
        nodes: Nodes = request.getfixturevalue("nodes")
        return nodes.router
    edge: Edge = request.getfixturevalue("edge")
    return HAProxyRouter(edge.run_dir)


def add(name: str, address: str = ADDRESS, weight: int = 1) -> AddServer:
    return AddServer(target=name, backend=BACKEND, address=address, spec=ECHO, weight=weight)


async def test_routes_are_written_and_read_back(router: Router) -> None:
    for services in ((ECHO,), (ECHO,), (ECHO, OTHER)):
        await write_routes(router, *services)
        state = await observe(router)
        assert state.routing_hash == router.routing_hash(services)
        assert state.backends == {f"svc_{each.name}" for each in services}
        assert state.servers == ()
    assert router.routing_hash([ECHO]) != router.routing_hash([ECHO, OTHER])


async def test_a_server_is_added_once_and_is_ready_whatever_was_there_before(router: Router) -> None:
    await write_routes(router, ECHO)
    for address in (ADDRESS, ADDRESS, "127.0.0.1:8"):
        await router.perform(add("echo-1", address))
        [found] = (await observe(router)).servers
        assert (found.name, found.address, found.state) == ("echo-1", address, ServerState.READY)
        await router.perform(SetServerState(target="echo-1", backend=BACKEND, state=ServerState.MAINT))


async def test_states_and_weights_are_set_and_read_back(router: Router) -> None:
    async def found() -> dict[str, Server]:
        return {server.name: server for server in (await observe(router)).servers}

    await write_routes(router, ECHO)
    await router.perform(add("echo-1"))
    for state in (ServerState.DRAIN, ServerState.MAINT, ServerState.READY):
        await router.perform(SetServerState(target="echo-1", backend=BACKEND, state=state))
        assert (await found())["echo-1"].state is state
    await router.perform(add("echo-2", weight=7))
    await router.perform(SetServerWeight(target="echo-1", backend=BACKEND, weight=200))
    assert {name: server.weight for name, server in (await found()).items()} == {"echo-1": 200, "echo-2": 7}
    with pytest.raises(RoutingError, match="No such server"):
        await router.perform(SetServerWeight(target="nobody", backend=BACKEND, weight=2))


async def test_servers_outlive_other_routes_and_waiting_rooms_open_again(router: Router) -> None:
    await write_routes(router, ECHO)
    await router.perform(add("echo-1"))
    for is_open in (False, False, True, True, False):
        await router.perform(SetWaitingRoom(target="echo", backend=BACKEND, is_open=is_open))
        assert (await observe(router)).closed == (frozenset() if is_open else {BACKEND})
    await write_routes(router, ECHO, OTHER)
    state = await observe(router)
    assert [server.name for server in state.servers] == ["echo-1"]
    assert state.closed == frozenset(), "a new worker has all of them open"


async def test_a_server_at_a_socket_is_read_back_and_outlives_other_routes(router: Router) -> None:
    name, address = "shop-echo-abcd1234-2", "unix:/run/pierhead/sockets/echo/abcd1234-2"
    await write_routes(router, ECHO)
    for _ in range(2):
        await router.perform(add(name, address))
        await router.perform(add("echo-1"))
        state = await observe(router)
        assert {server.name: server.address for server in state.servers} == {name: address, "echo-1": ADDRESS}
        await write_routes(router, ECHO, OTHER)


async def test_what_is_gone_needs_no_drain_and_no_deletion(router: Router) -> None:
    await write_routes(router, ECHO)
    await router.perform(add("echo-1"))
    for _ in range(2):
        await router.perform(SetServerState(target="echo-1", backend=BACKEND, state=ServerState.DRAIN))
        await router.perform(ShutdownSessions(target="echo-1", backend=BACKEND))
        await router.perform(DeleteServer(target="echo-1", backend=BACKEND))
        assert (await observe(router)).servers == ()


async def test_keys_are_written_and_read_back_and_outlive_other_routes(router: Router) -> None:
    for names in (("a",), ("a", "b"), ()):
        keys = KeySet.of(tuple(ServiceKey(name, digest_of(name), 0.0) for name in names))
        await write_routes(router, ECHO)
        await router.perform(WriteKeys(target="keys", keys=keys))
        for services in ((ECHO,), (replace(ECHO, auth="key"), OTHER)):
            await write_routes(router, *services)
            assert (await observe(router)).keys == keys.digest
