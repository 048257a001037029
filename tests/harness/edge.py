"""A real HAProxy with the controller's router, and replicas of this process behind it, for contract tests."""

from __future__ import annotations

import asyncio
import contextlib
import csv
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, TCPConnector, web

from controller.model.actions import AddServer, DeleteServer, SetServerState, WriteRouting
from controller.model.spec import ProbeSpec, ServiceSpec, backend_name
from controller.model.world import RoutingState, Server, ServerState
from controller.routing.base import Router
from controller.routing.haproxy import HAProxyRouter
from controller.routing.haproxy_socket import RuntimeSocket
from controller.routing.haproxy_state import traffic
from tests.harness.haproxy_container import HAProxyContainer
from tests.harness.waiting import PATIENCE_S, until

LARGE = 40_000
"""Bytes of a large answer: more than a client of 4 kB takes, and less than HAProxy and the kernel keep."""


class Replica:
    """One HTTP server of this process: answers /ready and whatever its tests ask for."""

    def __init__(self, host: str, name: str) -> None:
        self.host, self.name, self.port, self.requests, self.received = host, name, 0, 0, 0
        self.let_go = asyncio.Event()
        self.begun = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

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
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._runner.server, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server and self._runner:
            for one in self._server.sockets:
                asyncio.get_running_loop().remove_reader(one)
            for _ in range(2):  # a check of HAProxy that was just accepted: a closed server would leave it open
                await asyncio.sleep(0)
            self._server.close()
            await self._runner.cleanup()
        self._server = self._runner = None

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
                    body = await request.read()
                    self.received += len(body)
            case "slow":
                await request.read()
                await asyncio.sleep(1.5)
            case "die":
                assert request.transport is not None
                request.transport.abort()
            case "large":
                return web.Response(body=bytes(LARGE))
            case "missing":
                return web.Response(status=404)
            case "tokens":
                return web.Response(headers={"x-pierhead-tokens": request.query["used"]})
            case "socket":
                socket = web.WebSocketResponse()
                await socket.prepare(request)
                async for message in socket:
                    await socket.send_str(message.data)
                return socket
        return web.json_response(
            {"replica": self.name, "path": request.path, "headers": {k.lower(): v for k, v in request.headers.items()}}
        )


async def observe(router: Router) -> RoutingState:
    """One snapshot of a router that answers."""
    return await router.observe()


async def write_routes(router: Router, *services: ServiceSpec) -> None:
    action = WriteRouting(target="routing", services=services, routing_hash=router.routing_hash(services))
    await router.perform(action)


class Edge:
    """HAProxy in a container, with the router that the controller would use."""

    def __init__(self, run_dir: Path, container: HAProxyContainer) -> None:
        self.run_dir, self.container, self.router = run_dir, container, HAProxyRouter(run_dir)
        self.url = f"http://{container.ip}:8000"
        # A connection for each request: one that is kept open gets its next answer from the former worker.
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
        await write_routes(self.router, *services)

    async def add(self, service: str, name: str, address: str, probe_port: int | None = None) -> None:
        """Add a server; its probe goes to its own port unless told otherwise."""
        spec = with_probe_port(self.specs[service], probe_port or int(address.rpartition(":")[2]))
        await self.router.perform(
            AddServer(target=name, service=service, backend=backend_name(service), address=address, spec=spec)
        )

    async def serve(self, service: str, name: str) -> Replica:
        replica = await self.replica(name)
        await self.add(service, name, replica.address)
        return replica

    @contextlib.asynccontextmanager
    async def busy(self, service: str, replica: Replica) -> AsyncIterator[None]:
        """The replica has a request until the block ends, which is then answered."""
        replica.begun.clear()
        replica.let_go.clear()
        request = asyncio.ensure_future(self.http.post(f"/{service}/hold"))
        await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
        try:
            yield
        finally:
            replica.let_go.set()
            assert (await request).status == 200

    async def drain(self, service: str, name: str) -> None:
        backend = backend_name(service)
        await self.router.perform(SetServerState(target=name, backend=backend, state=ServerState.DRAIN))

    async def state(self) -> RoutingState:
        return await observe(self.router)

    async def server(self, name: str) -> Server:
        return next(server for server in (await self.state()).servers if server.name == name)

    async def sessions(self, name: str) -> int:
        return (await self.server(name)).sessions

    async def sessions_so_far(self, service: str, name: str) -> int:
        """Those that have ended are counted too."""
        rows = await RuntimeSocket(self.run_dir / "admin.sock").ask(f"show stat {backend_name(service)} 4 -1")
        found = csv.DictReader(rows.removeprefix("# ").splitlines())
        return next(int(row["stot"]) for row in found if row["svname"] == name)

    async def is_up(self, name: str) -> bool:
        return (await self.server(name)).up

    async def queued(self, service: str) -> int:
        """Requests that wait for the service, or for one of its servers."""
        state = await self.state()
        return state.queued[backend_name(service)] + sum(server.queued for server in state.servers)

    async def is_idle(self, service: str) -> bool:
        """Whether HAProxy counts no request of the service as in flight: it does for a moment after the answer."""
        backend = backend_name(service)
        seen = traffic(await RuntimeSocket(self.run_dir / "admin.sock").ask(f"show stat {backend} 6 -1"))
        return not any(row.sessions for row in seen.values())

    async def logged(self, count: int) -> list[dict[str, Any]]:
        """The access log, once it has so many lines, by the time of the requests: HAProxy has several threads."""
        lines: list[dict[str, Any]] = []

        async def enough() -> bool:
            lines[:] = await asyncio.to_thread(self.container.log_lines)
            return len(lines) >= count

        await until(enough, f"the access log has {count} lines")
        return sorted(lines, key=lambda line: str(line["time"]))

    async def metrics(self) -> str:
        async with ClientSession() as client, client.get(f"http://{self.container.ip}:8404/metrics") as answer:
            assert answer.status == 200
            return await answer.text()

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


async def error_of(edge: Edge, path: str, **arguments: Any) -> tuple[int, dict[str, Any], Any]:
    """Status, the error's fields and the headers of an answer that must be a JSON error."""
    method = arguments.pop("method", "GET")
    async with edge.http.request(method, path, **arguments) as answer:
        assert answer.content_type == "application/json"
        error = (await answer.json())["error"]
        assert error["request_id"] == answer.headers["x-request-id"]
        return answer.status, error, answer.headers


async def posted(session: ClientSession) -> int:
    """The status of a POST to the echo. This client repeats a failed GET by itself, and hides what a test looks for."""
    async with session.post("/echo") as answer:
        await answer.read()
        return answer.status


class GrpcReplica:
    """Serves every method of `test.Echo`: Unary gives back what it was sent, and in its trailers who is said to have
    sent it; Hold waits, Die ends the server.
    """

    def __init__(self, host: str, name: str = "one") -> None:
        self.name = name
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
        told = ("forwarded", "pierhead", "authorization")
        metadata = context.invocation_metadata()
        sent = " ".join(f"{name}={text}" for name, text in metadata if any(word in name for word in told))
        context.set_trailing_metadata((("replica", self.name), ("received", sent)))
        return request

    async def _hold(self, request: bytes, context: Any) -> bytes:
        self.begun.set()
        await self.let_go.wait()
        return request

    async def _count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(5):
            yield str(number).encode()


class Load:
    """Clients that make requests without a pause until the block ends; counts the outcomes."""

    def __init__(self, clients: int, ask: Callable[[], Awaitable[object]]) -> None:
        self.outcomes: dict[object, int] = {}
        self._clients, self._ask, self._is_over = clients, ask, False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._clients):
                tasks.create_task(self._client())
            try:
                yield self
            finally:
                self._is_over = True

    async def more(self, requests: int) -> None:
        """Wait until so many more requests are answered."""
        before = sum(self.outcomes.values())

        async def enough() -> bool:
            return sum(self.outcomes.values()) >= before + requests

        await until(enough, f"{requests} more requests are answered")

    async def _client(self) -> None:
        while not self._is_over:
            try:
                outcome = await self._ask()
            except Exception as error:
                outcome = repr(error)
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value


def metadata_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Headers and trailers of a refusal."""
    return dict(error.initial_metadata() or ()) | dict(error.trailing_metadata() or ())
