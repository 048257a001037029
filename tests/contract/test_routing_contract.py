"""What the router does with a real HAProxy."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientError

from controller.errors import RoutingError, RoutingUnreachable
from controller.model.actions import AddServer, DeleteServer, SetServerState, SetWaitingRoom, ShutdownSessions
from controller.model.spec import ServiceSpec, backend_name
from controller.model.world import Server, ServerState
from controller.routing import haproxy_config, haproxy_process, haproxy_state
from controller.routing.haproxy import HAProxyRouter
from controller.routing.haproxy_socket import CommandRefused, RuntimeSocket, command
from controller.settings import DEFAULT_LIMITS, EdgeLimits
from tests.harness.edge import Edge, Replica, observe, service, write_routes
from tests.harness.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine


class World:
    """HAProxy in a container; the backends are servers of this process."""

    def __init__(self, edge: Edge, replicas: list[Replica]) -> None:
        self.run_dir, self.edge, self.replicas = edge.run_dir, edge, replicas
        self.addresses = [replica.address for replica in replicas]

    async def occupy(self, path: str) -> Callable[[], Any]:
        """Let the first replica, the only one behind `path`, have one request until the returned function is called."""
        replica = self.replicas[0]
        request = asyncio.ensure_future(self.edge.http.post(f"{path}/hold"))  # a GET would be sent again
        begun = asyncio.ensure_future(replica.begun.wait())
        await asyncio.wait({begun, request}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert begun.done(), f"the request did not reach the replica: {request}"

        async def release() -> None:
            replica.let_go.set()
            with contextlib.suppress(ClientError):  # whether it was cut off is for the test to say
                async with asyncio.timeout(PATIENCE_S):
                    (await request).release()

        return release

    async def restart(self) -> None:
        await asyncio.to_thread(self.edge.container.kill_and_wait)


@pytest_asyncio.fixture
async def world(edge: Edge) -> World:
    return World(edge, [await edge.replica(f"replica-{number}") for number in range(3)])


@pytest.fixture
def router(world: World) -> HAProxyRouter:
    return HAProxyRouter(world.run_dir)


ECHO, OTHER = service("echo"), service("other")


async def server(router: HAProxyRouter, name: str) -> Server:
    return next(s for s in (await observe(router)).servers if s.name == name)


async def names(router: HAProxyRouter) -> list[str]:
    return [server.name for server in (await observe(router)).servers]


async def add(router: HAProxyRouter, name: str, address: str, spec: ServiceSpec = ECHO, weight: int = 1) -> None:
    backend = backend_name(spec.name)
    await router.perform(AddServer(target=name, backend=backend, address=address, spec=spec, weight=weight))


async def set_state(router: HAProxyRouter, name: str, state: ServerState, backend: str = "svc_echo") -> None:
    await router.perform(SetServerState(target=name, backend=backend, state=state))


async def delete(router: HAProxyRouter, name: str, backend: str = "svc_echo") -> None:
    await router.perform(DeleteServer(target=name, backend=backend))


async def deletion_of(router: HAProxyRouter, name: str) -> asyncio.Future[None]:
    """A deletion that has begun and waits for the server's last request."""
    deletion = asyncio.ensure_future(delete(router, name))

    async def in_maintenance() -> bool:
        return (await server(router, name)).state is ServerState.MAINT

    await until(in_maintenance, f"{name} is in maintenance")
    return deletion


async def set_waiting_room(router: HAProxyRouter, name: str, *, is_open: bool) -> None:
    await router.perform(SetWaitingRoom(target=name, backend=backend_name(name), is_open=is_open))


async def test_a_new_haproxy_has_no_services_and_routes_are_loaded_once(world: World, router: HAProxyRouter) -> None:
    new = await observe(router)
    assert new.routing_hash == router.routing_hash(())
    assert (new.servers, new.backends) == ((), frozenset())
    assert new.version.startswith("3.0")
    await write_routes(router, ECHO)
    after = await observe(router)
    assert after.pid != new.pid
    await write_routes(router, ECHO)
    assert (await observe(router)).pid == after.pid


async def test_a_server_has_its_limit_and_adding_it_again_changes_nothing(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    await add(router, "echo-1", world.addresses[0])
    before = await observe(router)
    ready = Server("svc_echo", "echo-1", world.addresses[0], ServerState.READY, up=True, limit=100)
    assert before.servers == (ready,)
    await add(router, "echo-1", world.addresses[0])
    assert await observe(router) == before


async def test_waiting_rooms_are_closed_without_a_reload_until_a_restart(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO, OTHER)
    before = await observe(router)
    for name in ("echo", "other"):
        await set_waiting_room(router, name, is_open=False)
    await set_waiting_room(router, "echo", is_open=True)
    after = await observe(router)
    assert (after.closed, after.pid) == (frozenset({"svc_other"}), before.pid)
    with pytest.raises(RoutingError, match="set held svc_nobody closed`: No such backend"):
        await set_waiting_room(router, "nobody", is_open=False)
    await world.restart()
    assert (await observe(router)).closed == frozenset()


async def test_what_is_gone_already_needs_no_drain_and_no_deletion(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    for backend in ("svc_echo", "svc_never"):
        await set_state(router, "echo-1", ServerState.DRAIN, backend)
        await router.perform(ShutdownSessions(target="echo-1", backend=backend))
        await delete(router, "echo-1", backend)
    with pytest.raises(RoutingError, match=r"enable health svc_echo/echo-1.*No such server"):
        await set_state(router, "echo-1", ServerState.READY)


async def test_a_busy_server_is_not_deleted_until_its_requests_are_over(
    world: World, router: HAProxyRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy_process, "REMOVABLE_WAIT_S", 1)
    await write_routes(router, ECHO)
    await add(router, "echo-1", world.addresses[0])
    release = await world.occupy("/echo")
    await set_state(router, "echo-1", ServerState.DRAIN)
    assert (await server(router, "echo-1")).sessions == 1
    with pytest.raises(RoutingError, match="server svc_echo/echo-1 still has connections after 1 s"):
        await delete(router, "echo-1")
    await release()
    await delete(router, "echo-1")
    assert await names(router) == []


async def test_other_changes_continue_while_a_busy_server_waits_to_be_deleted(
    world: World, router: HAProxyRouter
) -> None:
    await write_routes(router, ECHO)
    for name, address in zip(("echo-1", "echo-2"), world.addresses, strict=False):
        await add(router, name, address)
    await set_state(router, "echo-2", ServerState.MAINT)
    release = await world.occupy("/echo")
    deletion = await deletion_of(router, "echo-1")
    await set_state(router, "echo-2", ServerState.READY)
    await add(router, "echo-3", world.addresses[2])
    assert not deletion.done(), "the other changes waited for the deletion"
    assert [(s.name, s.state) for s in (await observe(router)).servers] == [
        ("echo-1", ServerState.MAINT),
        ("echo-2", ServerState.READY),
        ("echo-3", ServerState.READY),
    ]
    await release()
    await deletion
    assert await names(router) == ["echo-2", "echo-3"]
    assert "server echo-1 " not in (world.run_dir / "haproxy.cfg").read_text()


async def test_a_server_that_is_being_deleted_is_added_after_it(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    await add(router, "echo-1", world.addresses[0])
    release = await world.occupy("/echo")
    deletion = await deletion_of(router, "echo-1")
    addition = asyncio.ensure_future(add(router, "echo-1", world.addresses[1]))
    await release()
    await asyncio.gather(deletion, addition)
    (found,) = (await observe(router)).servers
    assert (found.address, found.state) == (world.addresses[1], ServerState.READY)


async def test_a_deadline_ends_what_a_server_still_has(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    await add(router, "echo-1", world.addresses[0])
    release = await world.occupy("/echo")
    await router.perform(ShutdownSessions(target="echo-1", backend="svc_echo"))
    await delete(router, "echo-1")
    await release()
    assert await names(router) == []


async def test_the_process_survives_scaling(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    before = await observe(router)
    for number in range(50):
        await add(router, f"echo-{number}", world.addresses[number % 3])
        if number >= 3:
            await delete(router, f"echo-{number - 3}")
    after = await observe(router)
    assert [s.name for s in after.servers] == ["echo-47", "echo-48", "echo-49"]
    assert (after.pid, after.started_at) == (before.pid, before.started_at)


async def test_changes_in_a_row_know_of_each_other(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    async with asyncio.TaskGroup() as tasks:  # a task waits for those before it
        tasks.create_task(add(router, "echo-1", world.addresses[0]))
        tasks.create_task(add(router, "echo-2", world.addresses[0]))
        tasks.create_task(add(router, "echo-1", world.addresses[1]))
        tasks.create_task(delete(router, "echo-2"))
        tasks.create_task(add(router, "echo-3", world.addresses[2]))
        tasks.create_task(add(router, "echo-2", world.addresses[2]))
        tasks.create_task(set_state(router, "echo-3", ServerState.MAINT))
        tasks.create_task(add(router, "echo-3", world.addresses[2]))
    found = [(s.name, s.address, s.state) for s in (await observe(router)).servers]
    assert found == [
        ("echo-1", world.addresses[1], ServerState.READY),
        ("echo-2", world.addresses[2], ServerState.READY),
        ("echo-3", world.addresses[2], ServerState.READY),
    ]


async def test_a_change_that_fails_does_not_mislead_those_after_it(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    changes = [("echo-1", ECHO), ("other-1", OTHER), ("echo-2", ECHO)]
    ends = await asyncio.gather(
        *(add(router, name, world.addresses[0], spec) for name, spec in changes), return_exceptions=True
    )
    assert [type(end) for end in ends] == [type(None), CommandRefused, type(None)]
    assert re.search(r"add server svc_other/other-1 .*No such backend", str(ends[1]))
    assert await names(router) == ["echo-1", "echo-2"]


async def test_a_reload_keeps_the_servers_and_their_states(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    for number in range(3):
        await add(router, f"echo-{number}", world.addresses[number])
    await set_state(router, "echo-2", ServerState.DRAIN)
    before = await observe(router)
    await write_routes(router, ECHO, OTHER)
    after = await observe(router)
    assert after.pid != before.pid
    assert after.backends == {"svc_echo", "svc_other"}
    assert after.servers == before.servers
    await delete(router, "echo-0")
    assert await names(router) == ["echo-1", "echo-2"], "also what came with a reload can be deleted"


async def test_requests_of_before_a_reload_still_count(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    await add(router, "echo-1", world.addresses[0])
    release = await world.occupy("/echo")
    await write_routes(router, ECHO, OTHER)
    await set_state(router, "echo-1", ServerState.DRAIN)
    assert (await server(router, "echo-1")).sessions == 1
    await release()

    async def nothing_left() -> bool:
        return (await server(router, "echo-1")).sessions == 0

    await until(nothing_left, "the former worker is done with echo-1")


async def test_a_configuration_that_is_refused_leaves_everything_as_it_was(
    world: World, router: HAProxyRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_routes(router, ECHO)
    await add(router, "echo-1", world.addresses[0])
    before, file_before = await observe(router), (world.run_dir / "haproxy.cfg").read_text()
    render = haproxy_config.render

    def broken(services: Collection[ServiceSpec], limits: EdgeLimits, **options: Any) -> str:
        return f"{render(services, limits, **options)}unheard-of keyword\n"

    with monkeypatch.context() as patch:
        patch.setattr(haproxy_config, "render", broken)
        with pytest.raises(RoutingError, match=r"refused to load .*(?s:.*)unknown keyword 'unheard-of'"):
            await write_routes(router, OTHER)
    assert await observe(router) == before
    assert (world.run_dir / "haproxy.cfg").read_text() == file_before
    await write_routes(router, ECHO, OTHER)
    assert (await observe(router)).backends == {"svc_echo", "svc_other"}


async def test_a_restart_begins_with_the_servers_of_now(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    for number in range(3):
        await add(router, f"echo-{number}", world.addresses[number])
    await set_state(router, "echo-1", ServerState.DRAIN)
    await delete(router, "echo-2")
    before = await observe(router)
    await world.restart()
    after = await observe(router)
    # Process ids repeat in a container, and the time of start is in whole seconds: together they tell a restart.
    assert (after.pid, after.started_at) != (before.pid, before.started_at)
    assert after.routing_hash == before.routing_hash
    assert [(s.name, s.state) for s in after.servers] == [("echo-0", ServerState.READY), ("echo-1", ServerState.MAINT)]
    await set_state(router, "echo-1", ServerState.READY)
    assert (await server(router, "echo-1")).state is ServerState.READY


async def test_nothing_is_observed_where_nothing_answers(tmp_path: Path) -> None:
    with pytest.raises(RoutingUnreachable):
        await HAProxyRouter(tmp_path).observe()


async def test_a_broken_file_does_not_keep_haproxy_from_starting(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    (world.run_dir / "haproxy.cfg").write_text("nonsense\n")
    await world.restart()
    assert (await observe(router)).routing_hash == router.routing_hash(())
    await write_routes(router, ECHO)
    assert (await observe(router)).backends == {"svc_echo"}


async def test_a_server_whose_adding_was_cut_off_is_checked_once_ready(world: World, router: HAProxyRouter) -> None:
    await write_routes(router, ECHO)
    nowhere = world.addresses[0].rpartition(":")[0] + ":1"
    options = haproxy_config.server_options(ECHO)
    add_alone = command("add", "server", "svc_echo/echo-1", nowhere, "id", "1", *options)
    await RuntimeSocket(world.run_dir / "admin.sock").ask(add_alone)
    await set_state(router, "echo-1", ServerState.READY)

    async def is_down() -> bool:
        return not (await server(router, "echo-1")).up

    await until(is_down, "HAProxy's check has found echo-1 down")


async def test_a_version_that_loses_requests_gets_no_routes(
    world: World, router: HAProxyRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await observe(router)
    monkeypatch.setattr(haproxy_state, "refusal_of_version", lambda version: f"version {version} may abort requests")
    with pytest.raises(RoutingError, match=r"HAProxy version 3\..* may abort requests\. No routes were written\."):
        await write_routes(router, ECHO)
    assert await observe(router) == before


async def test_a_file_that_is_not_what_haproxy_runs_is_left_alone(
    world: World, router: HAProxyRouter, caplog: pytest.LogCaptureFixture
) -> None:
    file = world.run_dir / "haproxy.cfg"
    await write_routes(router, ECHO)
    file.write_text(other := haproxy_config.render((ECHO, OTHER), DEFAULT_LIMITS))
    await add(router, "echo-1", world.addresses[0])
    assert file.read_text() == other
    assert "is not what HAProxy runs and was left alone" in caplog.text
    # The next change of routes sees that the file is wrong, though HAProxy runs what is asked for.
    await write_routes(router, ECHO)
    assert f"    server echo-1 {world.addresses[0]} id 1" in file.read_text()
