"""Real replicas on loopback ports inside the test's own event loop, and callers that know where they are."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession
from pierhead import BadRequest, Settings
from pierhead.calls.clients import Clients
from pierhead.deadlines import Deadlines
from pierhead.discovery.v1 import discovery_pb2, discovery_pb2_grpc
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.server import ReplicaServer
from pierhead.request import RequestContext, current_request

from tests.harness.waiting import PATIENCE_S
from tests.harness.waiting import until as until


class EchoService(echo_pb2_grpc.EchoServicer):
    """Answers; blocks, fails or watches as the message says."""

    def __init__(self, name: str = "echo") -> None:
        self.name = name
        self.gate = asyncio.Event()
        self.calls = 0
        self.begun = 0
        self.cancelled = 0
        self.seen: list[RequestContext | None] = []

    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        self.calls += 1
        self.seen.append(current_request())
        if request.message == "bad":
            raise BadRequest('message: expected anything but "bad"')
        if request.message == "boom":
            raise ValueError("boom")
        if request.message == "abort":
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "there is one already")
        if request.message == "wait":
            await self._wait()
        return echo_pb2.EchoReply(response=f"{self.name}: {request.message}")

    async def Generate(self, request: echo_pb2.GenerateRequest, context: Any) -> AsyncIterator[echo_pb2.Token]:
        self.calls += 1
        for index in range(request.num_tokens):
            if request.message == "wait" and index == 1:
                await self._wait()
            if request.message == "boom" and index == 1:
                raise ValueError("boom")
            yield echo_pb2.Token(text=self.name, index=index)

    async def _wait(self) -> None:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def echo(message: str = "hi") -> echo_pb2.EchoRequest:
    return echo_pb2.EchoRequest(message=message)


def generate(message: str = "hi", num_tokens: int = 3) -> echo_pb2.GenerateRequest:
    return echo_pb2.GenerateRequest(message=message, num_tokens=num_tokens)


def pass_deadlines(seconds: float) -> None:
    """Have the deadlines of this loop fire that are due within so many seconds, as if these had passed."""
    deadlines = Deadlines.current()
    clock = deadlines._clock
    deadlines._clock = lambda: clock() + seconds
    deadlines._fire()
    deadlines._clock = clock


def errors(caplog: pytest.LogCaptureFixture, least: int = logging.ERROR) -> list[str]:
    """What was logged at that level or above, but for what gRPC's poller says to the asyncio logger now and then: that
    a read found nothing, or that the loop of an earlier test is closed.
    """
    told = [(record.name, _FORMAT.format(record)) for record in caplog.records if record.levelno >= least]
    return [text for name, text in told if name != "asyncio" or not _OF_GRPC_S_POLLER.search(text)]


_FORMAT = logging.Formatter("%(levelname)s %(name)s %(message)s")
_OF_GRPC_S_POLLER = re.compile("PollerCompletionQueue|loop is closed")


class Cluster:
    """Replicas of one test."""

    def __init__(self) -> None:
        self.running: dict[ReplicaServer, asyncio.Task[None]] = {}
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, *parts: object, **settings: Any) -> ReplicaServer:
        """Start a replica and return it once it is ready."""
        defaults: dict[str, Any] = {
            "host": "127.0.0.1", "port": 0, "grpc_port": 0, "admin_port": 0, "service": "echo-child",
            "drain_timeout_s": 5.0,
        }  # fmt: skip
        metrics = settings.pop("metrics", None) or RuntimeMetrics()
        contract = settings.pop("contract", b"")
        server = ReplicaServer(*parts, settings=Settings(**(defaults | settings)), metrics=metrics, contract=contract)
        task = asyncio.create_task(server.run())
        self.running[server] = task
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if task.done():
            del self.running[server]
            await task
        return server

    async def drained(self, server: ReplicaServer) -> None:
        """Stop a replica and wait until it has ended."""
        server.stop()
        await self.ended(server)

    async def ended(self, server: ReplicaServer) -> None:
        """Wait until a replica has ended by itself."""
        async with asyncio.timeout(PATIENCE_S):
            await self.running[server]

    async def process(self, source: str, port: int, **environ: str) -> asyncio.subprocess.Process:
        """Run a replica in a process of its own, which a test may kill; returns once it is ready."""
        environ = {"PIERHEAD_HOST": "127.0.0.1", "PIERHEAD_PORT": str(port), "PIERHEAD_ADMIN_PORT": "0"} | environ
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", source, env=environ, stderr=asyncio.subprocess.PIPE
        )
        self.processes.append(process)
        assert process.stderr is not None
        lines = []
        async with asyncio.timeout(PATIENCE_S):
            while line := await process.stderr.readline():
                lines.append(line.decode())
                if '"ready"' in lines[-1]:
                    return process
        raise AssertionError("the process ended before it was ready:\n" + "".join(lines))

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
            process._transport.close()  # type: ignore[attr-defined]
        for server in self.running:
            server.stop()
            server.stop()
        await asyncio.gather(*self.running.values(), return_exceptions=True)


async def readyz(server: ReplicaServer) -> tuple[int, dict[str, Any]]:
    """Status and document of /readyz."""
    async with ClientSession() as client, client.get(f"http://127.0.0.1:{server.admin_port}/readyz") as response:
        return response.status, await response.json()


def address(server: ReplicaServer) -> str:
    """Where its callers find it: at its socket, if it has one."""
    socket = server.settings.socket
    return f"unix:{socket}" if socket else f"127.0.0.1:{server.grpc_port}"


def know(*servers: ReplicaServer, **settings: Any) -> None:
    """Tell the handles of this loop where the service "echo-child" is."""
    Clients.use(Settings(static={"ECHO_CHILD": tuple(address(server) for server in servers)}, **settings))


class FakeDiscovery(discovery_pb2_grpc.DiscoveryServicer):
    """A controller's Discovery service whose lists a test sets."""

    def __init__(self) -> None:
        self.watches = 0
        self.asked: list[list[str]] = []
        self._states: dict[str, discovery_pb2.ServiceEndpoints] = {}
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def listen(self, port: int = 0) -> int:
        self._server = grpc.aio.server()
        discovery_pb2_grpc.add_DiscoveryServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def say(
        self,
        service: str,
        *replicas: tuple[str, str, bool],
        limit: int = 0,
        max_queued: int | None = None,
        nodes: Mapping[str, str] | None = None,
        policy: str = "",
        stats: Mapping[str, tuple[int, Mapping[str, float]]] | None = None,
        scaled_to_zero_by: str = "",
        sockets: Mapping[str, str] | None = None,
    ) -> None:
        """The whole list of a service: (name, address, draining) each. `stats`: version and numbers, by name."""
        known = self._states.get(service)
        state = discovery_pb2.Endpoint.State
        self._states[service] = discovery_pb2.ServiceEndpoints(
            service=service,
            generation=known.generation + 1 if known else 1,
            epoch=1,
            endpoints=[
                discovery_pb2.Endpoint(
                    replica=name,
                    address=where,
                    state=state.DRAINING if draining else state.READY,
                    max_ongoing_requests=limit,
                    node=(nodes or {}).get(name, ""),
                    socket=(sockets or {}).get(name, ""),
                    stats_version=(stats or {}).get(name, (0, {}))[0],
                    stats=(stats or {}).get(name, (0, {}))[1],
                )
                for name, where, draining in replicas
            ],
            max_queued_requests=max_queued,
            policy=policy,
            scaled_to_zero_by=scaled_to_zero_by,
        )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Watch(
        self, request: discovery_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[discovery_pb2.ServiceEndpoints]:
        self.watches += 1
        self.asked.append(list(request.services))
        sent: dict[str, int] = {}
        while True:
            changed = self._changed
            for service in request.services:
                state = self._states.get(service)
                if state is None:
                    known = sorted(self._states)
                    state = discovery_pb2.ServiceEndpoints(service=service, unknown=True, known_services=known)
                if sent.get(service) != state.generation:
                    sent[service] = state.generation
                    yield state
            await changed.wait()
