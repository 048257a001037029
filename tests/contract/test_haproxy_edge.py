"""What clients see of the real HAProxy: routes, refusals, queues, health, logs, gRPC, and nothing of scaling."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from aiohttp import ClientSession, TCPConnector, WSMsgType, web

from controller.model.actions import AddServer, DeleteServer, SetServerState, WriteRouting
from controller.model.spec import Backpressure, ProbeSpec, ServiceSpec, backend_name
from controller.model.world import ServerState
from controller.routing import haproxy_config
from controller.routing.haproxy import HAProxyRouter
from controller.routing.haproxy_socket import RuntimeSocket
from controller.routing.haproxy_state import traffic
from tests.harness.haproxy_container import HAProxyContainer
from tests.harness.waiting import PATIENCE_S

pytestmark = pytest.mark.engine


class Replica:
    """One HTTP server of this process: answers /ready and whatever its tests ask for."""

    def __init__(self, host: str, name: str) -> None:
        self.host, self.name, self.port, self.requests, self.received = host, name, 0, 0, 0
        self.let_go = asyncio.Event()
        self.begun = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=0)
        app.router.add_get("/ready", self._ready)
        app.router.add_route("*", "/{path:.*}", self._answer)
        # As ours do: an idle connection is HAProxy's to close.
        self._runner = web.AppRunner(app, keepalive_timeout=3600, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
        self._runner = None

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        match request.path.rpartition("/")[2]:
            case "hold":
                self.begun.set()
                await self.let_go.wait()
            case "body":
                with contextlib.suppress(ConnectionError):  # HAProxy has given the client up
                    self.received += len(await request.read())
            case "slow":
                await request.read()
                await asyncio.sleep(1.5)
            case "die":
                assert request.transport is not None
                request.transport.abort()
            case "socket":
                socket = web.WebSocketResponse()
                await socket.prepare(request)
                async for message in socket:
                    await socket.send_str(message.data)
                return socket
        return web.json_response(
            {"replica": self.name, "path": request.path, "headers": {k.lower(): v for k, v in request.headers.items()}}
        )


class Edge:
    """HAProxy in a container, with the router that the controller would use."""

    def __init__(self, run_dir: Path, container: HAProxyContainer) -> None:
        self.run_dir, self.container, self.router = run_dir, container, HAProxyRouter(run_dir)
        self.url = f"http://{container.ip}:8000"
        # A connection for each request: one that is kept open gets its next answer from the worker of before.
        self.http = ClientSession(self.url, connector=TCPConnector(force_close=True))
        self.replicas: list[Replica] = []
        self.specs: dict[str, ServiceSpec] = {}

    async def replica(self, name: str) -> Replica:
        replica = Replica(self.container.gateway, name)
        await replica.start()
        self.replicas.append(replica)
        return replica

    async def route(self, *services: ServiceSpec) -> None:
        self.specs = {spec.name: spec for spec in services}
        action = WriteRouting(target="routing", services=services, routing_hash=self.router.routing_hash(services))
        await self.router.perform(action)

    async def add(self, service: str, name: str, address: str, probe_port: int | None = None) -> None:
        """Add a server; its probe goes to its own port unless told otherwise."""
        spec = self.specs[service]
        port = probe_port or int(address.rpartition(":")[2])
        spec = with_probe_port(spec, port)
        await self.router.perform(
            AddServer(target=name, service=service, backend=backend_name(service), address=address, spec=spec)
        )

    async def serve(self, service: str, name: str) -> Replica:
        replica = await self.replica(name)
        await self.add(service, name, replica.address)
        return replica

    async def drain(self, service: str, name: str) -> None:
        backend = backend_name(service)
        await self.router.perform(SetServerState(target=name, backend=backend, state=ServerState.DRAIN))

    async def sessions(self, name: str) -> int:
        state = await self.router.observe()
        assert state is not None
        return next(server.sessions for server in state.servers if server.name == name)

    async def is_idle(self, service: str) -> bool:
        """Whether HAProxy counts no request of the service as in flight: it does for a moment after the answer."""
        backend = backend_name(service)
        seen = traffic(await RuntimeSocket(self.run_dir / "admin.sock").ask(f"show stat {backend} 6 -1"))
        return not any(row.sessions for row in seen.values())

    async def metrics(self) -> str:
        async with ClientSession() as client, client.get(f"http://{self.container.ip}:8404/metrics") as answer:
            assert answer.status == 200
            return await answer.text()

    async def is_up(self, name: str) -> bool:
        state = await self.router.observe()
        assert state is not None
        return next(server.up for server in state.servers if server.name == name)

    async def remove(self, service: str, name: str) -> None:
        """Drain a server, wait until nothing is in flight, delete it."""
        await self.drain(service, name)

        async def idle() -> bool:
            return await self.sessions(name) == 0

        await until(idle, f"{name} is idle")
        await self.router.perform(DeleteServer(target=name, backend=backend_name(service)))


def with_probe_port(spec: ServiceSpec, port: int) -> ServiceSpec:

    return replace(spec, probe=ProbeSpec(port=port, path="/ready", period_s=600.0))


def service(name: str, **changes: Any) -> ServiceSpec:
    fields: dict[str, Any] = {
        "name": name,
        "image": name,
        "protocol": "http",
        "port": 8080,
        "replicas": 1,
        "probe": ProbeSpec(port=8080, path="/ready"),
        "route": f"/{name}",
        **changes,
    }
    return ServiceSpec(**fields)


KILLED = 137
"""Exit status of a container that SIGKILL has ended."""


async def until(look: Callable[[], Awaitable[object]], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait for a state of the world."""
    try:
        async with asyncio.timeout(within_s):
            while not await look():  # noqa: ASYNC110  another process changes it
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


@pytest_asyncio.fixture
async def edge(haproxy_image: str) -> AsyncIterator[Edge]:
    run_dir = Path(tempfile.mkdtemp(prefix="pierhead-haproxy-"))
    container = HAProxyContainer(run_dir)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, run_dir)
        await asyncio.to_thread(stack.enter_context, container.running())
        edge = Edge(run_dir, container)
        try:
            yield edge
        finally:
            await edge.http.close()
            for replica in edge.replicas:
                replica.let_go.set()
                await replica.stop()


async def error_of(edge: Edge, path: str, **arguments: Any) -> tuple[int, dict[str, Any], Any]:
    """Status, the error's fields and the headers of an answer that must be a JSON error."""
    method = arguments.pop("method", "GET")
    async with edge.http.request(method, path, **arguments) as answer:
        assert answer.content_type == "application/json"
        error = (await answer.json())["error"]
        assert error["request_id"] == answer.headers["x-request-id"]
        return answer.status, error, answer.headers


# ---------------------------------------------------------------------------------------------------------------- http


async def test_health_and_routes_tell_what_is_there(edge: Edge) -> None:
    async with edge.http.get("/-/healthz") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})
    await edge.route(service("echo"), service("b", route="/a/b"))
    status, error, headers = await error_of(edge, "/-/healthz")
    assert (status, error["code"], headers["retry-after"]) == (503, "no_replica", "1")
    await edge.serve("echo", "echo-1")
    async with edge.http.get("/-/healthz") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})
    async with edge.http.get("/-/routes") as answer:
        assert (answer.status, await answer.json()) == (200, {"/echo": "echo", "/a/b": "b"})


async def test_the_longest_prefix_decides_and_only_at_a_slash(edge: Edge) -> None:
    await edge.route(service("root", route="/"), service("a"), service("ab", route="/a/b"))
    for name in ("root", "a", "ab"):
        await edge.serve(name, name)
    for path, expected in {
        "/": "root", "/ax": "root", "/a": "a", "/a?x=/a/b": "a", "/a/": "a", "/a/bc": "a", "/a/b": "ab", "/a/b/c": "ab"
    }.items():  # fmt: skip
        async with edge.http.get(path) as answer:
            assert (path, (await answer.json())["replica"]) == (path, expected)


async def test_a_stripped_prefix_does_not_reach_the_replica(edge: Edge) -> None:
    await edge.route(service("v1", route="/api/v1.0", strip_prefix=True), service("whole"))
    await edge.serve("v1", "v1")
    await edge.serve("whole", "whole")
    for path, expected in {
        "/api/v1.0": "/",
        "/api/v1.0/": "/",
        "/api/v1.0/x/y?z=1": "/x/y",
        "/whole/x": "/whole/x",
    }.items():
        async with edge.http.get(path) as answer:
            assert (await answer.json())["path"] == expected


@pytest.mark.parametrize("path", ["/nowhere", "/echoes", '/a"b', "/a%22b\\c", "/ä/%0a"])
async def test_an_unknown_route_lists_the_routes(edge: Edge, path: str) -> None:
    await edge.route(service("echo"), service("rank"))
    status, error, _ = await error_of(edge, path)
    assert (status, error["code"]) == (404, "route_not_found")
    assert error["message"].endswith("The routes are /echo, /rank.")
    assert error["routes"] == {"/echo": "echo", "/rank": "rank"}


async def test_a_service_without_replica_says_so(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy_config, "HEAL_HOLD_S", 0.3)
    await edge.route(service("echo"))
    status, error, headers = await error_of(edge, "/echo")
    assert (status, error["code"], headers["retry-after"]) == (503, "no_replica", "1")
    assert error["message"] == "No replica of echo is ready. Nothing was done; try again."


async def test_a_request_id_is_kept_made_or_replaced_and_returned(edge: Edge) -> None:
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    for sent, kept in (("abc-123", True), (None, False), ('a"b', False), ("x" * 129, False)):
        async with edge.http.get("/echo", headers={"x-request-id": sent} if sent else {}) as answer:
            got = answer.headers["x-request-id"]
            assert (await answer.json())["headers"]["x-request-id"] == got
            assert (got == sent) is kept
            assert got


async def test_a_replica_learns_who_asked(edge: Edge) -> None:
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    async with edge.http.get("/echo") as answer:
        headers = (await answer.json())["headers"]
    assert headers["x-forwarded-for"] == edge.container.gateway
    assert headers["x-forwarded-proto"] == "http"
    assert headers["x-forwarded-host"] == f"{edge.container.ip}:8000"


async def test_a_replica_that_dies_is_told_as_such_and_not_asked_twice(edge: Edge) -> None:
    await edge.route(service("echo"))
    replicas = [await edge.serve("echo", f"echo-{n}") for n in range(2)]
    status, error, _ = await error_of(edge, "/echo/die", method="POST")
    assert (status, error["code"]) == (502, "bad_gateway")
    assert sum(replica.requests for replica in replicas) == 1


async def test_a_replica_that_does_not_answer_in_time(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy_config, "SERVER_TIMEOUT_SLACK_S", 0.0)
    await edge.route(service("echo", request_timeout_s=0.3))
    await edge.serve("echo", "echo-1")
    status, error, _ = await error_of(edge, "/echo/hold")
    assert (status, error["code"]) == (504, "gateway_timeout")


async def test_a_request_waits_in_the_queue_and_is_refused_when_its_time_is_over(edge: Edge) -> None:
    await edge.route(service("echo", max_ongoing_requests=1, request_timeout_s=0.5))
    replica = await edge.serve("echo", "echo-1")
    held = asyncio.ensure_future(edge.http.post("/echo/hold"))
    await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
    started = time.monotonic()
    status, error, headers = await error_of(edge, "/echo")
    assert (status, error["code"], headers["retry-after"]) == (503, "overloaded", "1")
    assert time.monotonic() - started > 0.4
    assert replica.requests == 1
    waiting = asyncio.ensure_future(edge.http.get("/echo"))
    replica.let_go.set()
    assert ((await held).status, (await waiting).status) == (200, 200)


async def test_refusals_are_what_the_service_says(edge: Edge) -> None:
    refusal = Backpressure(429, 2.5)
    await edge.route(service("echo", max_ongoing_requests=1, request_timeout_s=0.5, backpressure=refusal))
    replica = await edge.serve("echo", "echo-1")
    held = asyncio.ensure_future(edge.http.post("/echo/hold"))
    await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
    status, error, headers = await error_of(edge, "/echo")
    assert (status, error["code"], headers["retry-after"]) == (429, "overloaded", "3"), "it waited in vain"
    replica.let_go.set()
    assert (await held).status == 200
    await edge.route(
        service("echo", max_ongoing_requests=1, max_queued_requests=0, request_timeout_s=0.5, backpressure=refusal)
    )
    replica.begun.clear()
    replica.let_go.clear()
    held = asyncio.ensure_future(edge.http.post("/echo/hold"))
    await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
    status, error, headers = await error_of(edge, "/echo")
    assert (status, error["code"], headers["retry-after"]) == (429, "queue_full", "3"), "no room in the queue"
    replica.let_go.set()
    assert (await held).status == 200


async def test_a_full_queue_refuses_while_those_before_wait(edge: Edge) -> None:
    await edge.route(service("echo", max_ongoing_requests=1, max_queued_requests=1))
    replica = await edge.serve("echo", "echo-1")
    held = [asyncio.ensure_future(edge.http.post("/echo/hold"))]
    await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
    held.append(asyncio.ensure_future(edge.http.post("/echo/hold")))

    async def one_waits() -> bool:
        return 'haproxy_backend_current_queue{proxy="svc_echo"} 1' in await edge.metrics()

    await until(one_waits, "the second request is in the queue")
    status, error, headers = await error_of(edge, "/echo")
    assert (status, error["code"], headers["retry-after"]) == (503, "queue_full", "1")
    replica.let_go.set()
    assert [(await request).status for request in held] == [200, 200]


async def test_a_client_that_leaves_gives_up_its_place(edge: Edge) -> None:
    await edge.route(service("echo", max_ongoing_requests=1))
    replica = await edge.serve("echo", "echo-1")
    held = asyncio.ensure_future(edge.http.post("/echo/hold"))
    await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
    held.cancel()

    async def free() -> bool:
        return await edge.sessions("echo-1") == 0

    await until(free, "the replica is free again")


async def test_websockets_pass(edge: Edge) -> None:
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    async with edge.http.ws_connect("/echo/socket") as socket:
        await socket.send_str("hi")
        message = await socket.receive(timeout=PATIENCE_S)
        assert (message.type, message.data) == (WSMsgType.TEXT, "hi")


# -------------------------------------------------------------------------------------------------- health and servers


async def test_a_server_gets_traffic_and_none_while_it_is_gone(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy_config, "HEAL_HOLD_S", 0.3)
    first = await edge.replica("echo-1")
    await edge.route(with_probe_port(service("echo"), first.port))
    await edge.add("echo", "echo-1", first.address)
    async with edge.http.get("/echo") as answer:
        assert answer.status == 200
    await first.stop()

    async def down() -> bool:
        return not await edge.is_up("echo-1")

    await until(down, "HAProxy takes it out by itself")
    status, error, _ = await error_of(edge, "/echo")
    assert (status, error["code"]) == (503, "no_replica")
    await first.start()

    async def up() -> bool:
        return await edge.is_up("echo-1")

    await until(up, "HAProxy takes it back by itself")


async def test_a_replica_that_went_away_costs_no_request(edge: Edge) -> None:
    await edge.route(service("echo"))
    replicas = [await edge.serve("echo", f"echo-{n}") for n in range(2)]
    await replicas[0].stop()
    for _ in range(20):
        async with edge.http.get("/echo") as answer:
            assert (answer.status, (await answer.json())["replica"]) == (200, "echo-1")


@pytest.mark.parametrize("protocol", [{}, {"protocol": "grpc", "route": None, "grpc_services": ("test.Echo",)}])
async def test_where_nothing_is_asked_servers_are_up_that_take_connections(
    edge: Edge, protocol: dict[str, Any]
) -> None:
    """Also those that were down by the question before, and to be asked again takes down only who does not know it."""
    asked = service("echo", probe=ProbeSpec(port=8080, path="/die"), **protocol)
    silent = replace(asked, probe=replace(asked.probe, haproxy_asks=False))
    await edge.route(asked)
    addresses = {name: (await edge.replica(name)).address for name in ("echo-0", "echo-1")}
    await edge.replicas[1].stop()
    for name, address in addresses.items():
        add = AddServer(target=name, service="echo", backend="svc_echo", address=address, spec=asked)
        await edge.router.perform(add)

    def seen_as(*wanted: tuple[bool, bool]) -> Callable[[], Awaitable[bool]]:
        async def look() -> bool:
            state = await edge.router.observe()
            return state is not None and [(server.up, server.is_asked) for server in state.servers] == list(wanted)

        return look

    await until(seen_as((False, True), (False, True)), "neither answers what it is asked")
    await edge.route(silent)
    await until(seen_as((True, False), (False, True)), "the one that takes connections is up")
    await edge.route(asked)
    await until(seen_as((False, True), (False, True)), "neither answers what it is asked again")


async def test_a_restarted_haproxy_serves_at_once_and_goes_on_checking(edge: Edge) -> None:
    async with grpc_edge(edge) as (_, channel):
        await asyncio.to_thread(edge.container.kill_and_wait)
        call = channel.unary_unary("/test.Echo/Unary")(b"x", wait_for_ready=True, timeout=10)
        assert await call == b"x"

        async def checked() -> bool:
            return (
                'haproxy_server_check_status{proxy="svc_echo",server="echo-1",state="L7OK"} 1' in await edge.metrics()
            )

        await until(checked, "HAProxy has checked echo-1 itself and found it well")
        assert await edge.is_up("echo-1")


async def test_a_haproxy_that_hangs_is_silent_and_one_that_is_gone_is_not(edge: Edge) -> None:
    router = HAProxyRouter(edge.run_dir, http=(edge.container.ip, 8000))
    assert not await router.http_is_silent()
    with edge.container.hanging():
        assert await router.http_is_silent()
        assert await router.observe() is None
    assert not await router.http_is_silent()
    refuses = HAProxyRouter(edge.run_dir, http=(edge.container.ip, 8001))
    assert not await refuses.http_is_silent()


async def test_docker_stop_lets_requests_finish(edge: Edge) -> None:
    await edge.route(service("echo"))
    replica = await edge.serve("echo", "echo-1")
    held = asyncio.ensure_future(edge.http.post("/echo/hold"))
    await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
    stopping = asyncio.ensure_future(asyncio.to_thread(edge.container.stop))

    async def refuses() -> bool:
        try:
            _, writer = await asyncio.open_connection(edge.container.ip, 8000)
        except OSError:
            return True
        writer.close()
        return False

    await until(refuses, "new connections are refused")
    replica.let_go.set()
    assert (await held).status == 200
    assert await stopping != KILLED, "it ends once it is idle"


# -------------------------------------------------------------------------------------------------------- observability


async def test_the_access_log_is_json_and_leaves_health_out(edge: Edge) -> None:
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    paths = ["/echo/x?secret=1", '/echo/"quoted"\\', "/nowhere", "/-/healthz"]
    for path in paths:
        async with edge.http.get(path, headers={"x-request-id": f"id-{len(path)}"}):
            pass
    lines: list[dict[str, Any]] = []

    async def logged() -> bool:
        lines[:] = await asyncio.to_thread(edge.container.log_lines)
        return len(lines) >= 3

    await until(logged, "three lines are in the log")
    assert [(line["path"], line["service"], line["replica"], line["status"]) for line in lines] == [
        ("/echo/x", "echo", "echo-1", 200),
        ("/echo/%22quoted%22%5C", "echo", "echo-1", 200),
        ("/nowhere", "", "<NOSRV>", 404),
    ]
    assert lines[0]["request_id"] == f"id-{len(paths[0])}"
    assert lines[0]["termination"] == "----"
    assert {"total_ms", "queue_ms", "connect_ms", "response_ms", "bytes_in", "bytes_out", "retries"} <= lines[0].keys()


async def test_metrics_and_statistics_are_there(edge: Edge) -> None:
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    async with edge.http.get("/echo"):
        pass
    assert 'haproxy_server_http_responses_total{proxy="svc_echo",server="echo-1",code="2xx"} 1' in await edge.metrics()
    async with ClientSession() as client, client.get(f"http://{edge.container.ip}:8404/") as answer:
        assert (answer.status, answer.content_type) == (200, "text/html")


# ---------------------------------------------------------------------------------------------------------------- gRPC


class GrpcReplica:
    """Serves every method of `test.Echo`: Unary gives back what it was sent, Hold waits, Die ends the server."""

    def __init__(self, host: str) -> None:
        self.let_go, self.begun = asyncio.Event(), asyncio.Event()
        self.server = grpc.aio.server()
        unary = grpc.unary_unary_rpc_method_handler
        self.server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "test.Echo",
                    {
                        "Unary": unary(self._unary),
                        "Hold": unary(self._hold),
                        "Count": grpc.unary_stream_rpc_method_handler(self._count),
                    },
                ),
            )
        )
        self.address = f"{host}:{self.server.add_insecure_port(f'{host}:0')}"

    async def _unary(self, request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("replica", "one"),))
        return request

    async def _hold(self, request: bytes, context: Any) -> bytes:
        self.begun.set()
        await self.let_go.wait()
        return request

    async def _count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(5):
            yield str(number).encode()


@contextlib.asynccontextmanager
async def grpc_edge(edge: Edge, **changes: Any) -> AsyncIterator[tuple[GrpcReplica, Any]]:
    replica = GrpcReplica(edge.container.gateway)
    await replica.server.start()
    probe = await edge.replica("probe")
    spec = service("echo", protocol="grpc", route=None, grpc_services=("test.Echo", "test.Other"), **changes)
    await edge.route(with_probe_port(spec, probe.port))
    await edge.add("echo", "echo-1", replica.address, probe.port)
    async with grpc.aio.insecure_channel(f"{edge.container.ip}:9000") as channel:
        yield replica, channel
    replica.let_go.set()
    await replica.server.stop(0)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value


async def test_grpc_calls_go_through_with_trailers_and_streams(edge: Edge) -> None:
    async with grpc_edge(edge) as (_, channel):
        call = channel.unary_unary("/test.Echo/Unary")(b"x" * 300_000, metadata=(("x-request-id", "mine"),))
        assert await call == b"x" * 300_000
        assert dict(await call.trailing_metadata())["replica"] == "one"
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        stream = channel.unary_stream("/test.Echo/Count")(b"")
        assert [message async for message in stream] == [b"0", b"1", b"2", b"3", b"4"]


async def test_an_unknown_grpc_service_lists_the_known_ones(edge: Edge) -> None:
    async with grpc_edge(edge) as (_, channel):
        error = await refusal(channel.unary_unary("/test.EchoX/Unary")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert error.details() == "No such gRPC service here. Known are test.Echo, test.Other."


async def test_a_grpc_service_without_replica_is_unavailable(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy_config, "HEAL_HOLD_S", 0.3)
    async with grpc_edge(edge) as (_, channel):
        await edge.remove("echo", "echo-1")
        error = await refusal(channel.unary_unary("/test.Echo/Unary")(b""))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "No replica of echo is ready. Try again."


async def test_a_grpc_call_that_waited_too_long_is_unavailable(edge: Edge) -> None:
    async with grpc_edge(edge, max_ongoing_requests=1, request_timeout_s=0.4) as (replica, channel):
        held = asyncio.ensure_future(channel.unary_unary("/test.Echo/Hold")(b"").code())
        await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
        error = await refusal(channel.unary_unary("/test.Echo/Unary")(b""))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == (
            "No replica of echo took the call: all are busy or cannot be reached. Nothing was done. Try again."
        )
        replica.let_go.set()
        assert await held is grpc.StatusCode.OK


async def test_a_full_queue_refuses_grpc_calls_as_a_replica_does(edge: Edge) -> None:
    async with grpc_edge(edge, max_ongoing_requests=1, max_queued_requests=0) as (replica, channel):
        held = asyncio.ensure_future(channel.unary_unary("/test.Echo/Hold")(b"").code())
        await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
        error = await refusal(channel.unary_unary("/test.Echo/Unary")(b""))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (
            dict(error.initial_metadata() or ()).get("pierhead-refused") == "overloaded"
            or dict(error.trailing_metadata() or ()).get("pierhead-refused") == "overloaded"
        )
        replica.let_go.set()
        assert await held is grpc.StatusCode.OK


async def test_a_grpc_replica_that_dies_is_unavailable(edge: Edge) -> None:
    async with grpc_edge(edge) as (replica, channel):
        held = asyncio.ensure_future(refusal(channel.unary_unary("/test.Echo/Hold")(b"")))
        await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
        await replica.server.stop(0)
        assert (await held).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


# ---------------------------------------------------------------------------------------------------------- under load


class Load:
    """So many clients that ask without pause, each on its own connection; counts what they got."""

    def __init__(self, url: str, clients: int = 20) -> None:
        self.answers: dict[str, int] = {}
        self._url, self._clients, self._stop = url, clients, False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        tasks = [asyncio.create_task(self._client()) for _ in range(self._clients)]
        try:
            yield self
        finally:
            self._stop = True
            await asyncio.gather(*tasks)

    def count(self, outcome: str) -> None:
        self.answers[outcome] = self.answers.get(outcome, 0) + 1

    async def more(self, requests: int = 100) -> None:
        """Wait until so many more requests are answered."""
        before = sum(self.answers.values())

        async def enough() -> bool:
            return sum(self.answers.values()) >= before + requests

        await until(enough, f"{requests} more requests are answered")

    async def _client(self) -> None:
        # POST: this client would send a failed GET again by itself, and hide what the test looks for.
        async with ClientSession() as client:
            while not self._stop:
                try:
                    async with client.post(self._url) as answer:
                        await answer.read()
                        self.count(str(answer.status))
                except OSError as error:
                    self.count(repr(error))
                except Exception as error:
                    self.count(repr(error))


async def test_no_request_fails_while_servers_come_and_go(edge: Edge) -> None:
    await edge.route(service("echo", max_ongoing_requests=50))
    replicas = {"echo-0": await edge.serve("echo", "echo-0")}
    async with Load(f"{edge.url}/echo").running() as load:
        await load.more()
        for number in range(1, 13):
            replicas[f"echo-{number}"] = await edge.serve("echo", f"echo-{number}")
            await load.more(50)
            if number >= 3:
                name = f"echo-{number - 3}"
                await edge.remove("echo", name)
                await replicas[name].stop()
                await load.more(50)
    assert load.answers.keys() == {"200"}


async def test_no_request_fails_while_routes_change(edge: Edge) -> None:
    await edge.route(service("echo"))
    replicas = [await edge.serve("echo", f"echo-{n}") for n in range(3)]
    await edge.drain("echo", "echo-2")
    async with Load(f"{edge.url}/echo").running() as load:
        await load.more()
        served = replicas[2].requests
        for number in range(5):
            await edge.route(service("echo"), service(f"other-{number}"))
            await load.more(200)
        await edge.remove("echo", "echo-0")
        await replicas[0].stop()
        await load.more(200)
    assert load.answers.keys() == {"200"}
    assert replicas[2].requests == served


async def test_no_grpc_call_fails_while_servers_come_and_go_and_routes_change(edge: Edge) -> None:
    async with grpc_edge(edge) as (first, channel):
        probe = edge.replicas[0]
        grown = [first]
        echo, outcomes, stop = edge.specs["echo"], dict[grpc.StatusCode, int](), asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                code = await channel.unary_unary("/test.Echo/Unary")(b"x").code()
                outcomes[code] = outcomes.get(code, 0) + 1

        async def more(calls: int) -> None:
            before = sum(outcomes.values())

            async def enough() -> bool:
                return sum(outcomes.values()) >= before + calls

            await until(enough, f"{calls} more calls are answered")

        async with asyncio.TaskGroup() as tasks:
            for _ in range(10):
                tasks.create_task(client())
            for number in range(2, 6):
                grown.append(GrpcReplica(edge.container.gateway))
                await grown[-1].server.start()
                await edge.add("echo", f"echo-{number}", grown[-1].address, probe.port)
                await more(100)
                await edge.remove("echo", f"echo-{number - 1}")
                await grown[-2].server.stop(0)
                await more(100)
                await edge.route(echo, service(f"other-{number}"))
                await more(200)
            stop.set()
        await grown[-1].server.stop(0)
    assert outcomes.keys() == {grpc.StatusCode.OK}


# ------------------------------------------------------------------------------------------------------ x-serve.router


async def answered_by(edge: Edge, session: str | None) -> str:
    """Who answers a request that is the only one. One more may move a session: see haproxy_config.SESSION_HASH."""
    await until(lambda: edge.is_idle("echo"), "HAProxy has ended the request before")
    headers = {"x-session-id": session} if session else {}
    async with edge.http.get("/echo", headers=headers) as answer:
        assert answer.status == 200
        return str((await answer.json())["replica"])


async def homes(edge: Edge) -> dict[str, str]:
    """Who answers each of some sessions."""
    return {f"session-{n}": await answered_by(edge, f"session-{n}") for n in range(60)}


async def balanced(edge: Edge, policy: str, count: int) -> list[Replica]:
    """So many servers that are up, of a service with that policy."""
    await edge.route(service("echo", router_policy=policy))
    replicas = [await edge.serve("echo", f"echo-{number}") for number in range(count)]

    async def all_up() -> bool:
        return all([await edge.is_up(replica.name) for replica in replicas])

    await until(all_up, "all servers are up")
    return replicas


async def test_a_session_stays_where_it_is_and_only_those_of_a_server_that_comes_or_goes_move(edge: Edge) -> None:
    await balanced(edge, "consistent_hash", 3)
    first = await homes(edge)
    assert await homes(edge) == first
    assert set(first.values()) == {"echo-0", "echo-1", "echo-2"}
    await edge.serve("echo", "echo-3")
    await until(lambda: edge.is_up("echo-3"), "a fourth one is up")
    second = await homes(edge)
    moved = {session for session in first if second[session] != first[session]}
    assert {second[session] for session in moved} == {"echo-3"}, "those that move go to the new one"
    assert 0 < len(moved) < 40
    await edge.remove("echo", "echo-3")
    assert await homes(edge) == first, "and come back"
    assert len({await answered_by(edge, None) for _ in range(30)}) == 3, "without a session they are taken in turn"


async def test_at_little_load_a_session_passes_over_a_server_that_works_on_one_other_request(edge: Edge) -> None:
    replicas = await balanced(edge, "consistent_hash", 3)
    home = await answered_by(edge, "first")
    replica = next(replica for replica in replicas if replica.name == home)
    other = next(name for name, server in (await homes(edge)).items() if server == home)
    held = asyncio.ensure_future(edge.http.get("/echo/hold", headers={"x-session-id": other}))
    await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
    async with edge.http.get("/echo", headers={"x-session-id": "first"}) as answer:
        assert (await answer.json())["replica"] != home
    replica.let_go.set()
    (await held).release()
    assert await answered_by(edge, "first") == home


async def test_no_server_gets_more_than_its_share_of_a_busy_session(edge: Edge) -> None:
    replicas = await balanced(edge, "consistent_hash", 3)
    headers = {"x-session-id": "busy"}
    calls = [asyncio.ensure_future(edge.http.get("/echo/hold", headers=headers)) for _ in range(12)]

    async def all_there() -> bool:
        return sum(replica.requests for replica in replicas) == 12

    await until(all_there, "all requests have begun")
    assert max(replica.requests for replica in replicas) <= 1.25 * 12 / 3 + 1
    for replica in replicas:
        replica.let_go.set()
    for answer in await asyncio.gather(*calls):
        answer.release()


async def test_servers_are_taken_in_turn(edge: Edge) -> None:
    await balanced(edge, "round_robin", 2)
    answers = [await answered_by(edge, None) for _ in range(8)]
    assert answers in (["echo-0", "echo-1"] * 4, ["echo-1", "echo-0"] * 4)
