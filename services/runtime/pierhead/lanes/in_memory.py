"""Both ends of a lane joined in memory: calls within a process behave as calls between containers.

    caller's channel -> lane, caller's end ==> lane, replica's end -> edge -> method

Only the transport of packets is in memory: messages are serialised and parsed, errors become statuses and errors again;
deadlines, cancellation and flow control are the lanes' own. Streams of requests, which lanes do not carry, go over
plain gRPC on a loopback port that is opened for the first one.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from pierhead.edge.edge import Edge
from pierhead.edge.grpc_server import SERVER_OPTIONS, register
from pierhead.edge.methods import ServedMethod
from pierhead.lanes.client import CallerLane
from pierhead.lanes.connection import GrpcConnection, Method
from pierhead.lanes.server import ServedLane, by_path
from pierhead.lanes.window import WINDOW_BYTES
from pierhead.metrics import RuntimeMetrics
from pierhead.tasks import end_tasks

logger = logging.getLogger("pierhead")


class LocalReplica:
    """Methods behind the edge of a replica, for calls within the process."""

    def __init__(self, methods: Sequence[ServedMethod], edge: Edge) -> None:
        self.methods = methods
        self.edge = edge

    @property
    def metrics(self) -> RuntimeMetrics:
        """The replica's."""
        return self.edge.metrics

    def connect(self, _: str, changed: Callable[[], None]) -> LocalConnection:
        """Connect, as a pool does over a transport."""
        return LocalConnection(self, changed)


class _CallersEnd(CallerLane):
    largest_packet = sys.maxsize


class _ReplicasEnd(ServedLane):
    largest_packet = large = sys.maxsize


class LocalConnection:
    """A `Connection` to a LocalReplica: both ends of a lane, joined in memory, and plain gRPC for the other calls."""

    def __init__(self, replica: LocalReplica, changed: Callable[[], None]) -> None:
        self.ready = True
        self._replica = replica
        self._changed = changed
        self._server: grpc.aio.Server | None = None
        self._grpc: GrpcConnection | None = None
        self._caller = _CallersEnd(self._plain_grpc)
        self._served = _ReplicasEnd(by_path(replica.methods), replica.edge, "local")
        self._served.peer_window = WINDOW_BYTES  # as in a caller's hello
        self._packets: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        # An empty context: a servicer in another process would see none of the caller's variables.
        self._carrier = asyncio.get_running_loop().create_task(
            self._carry(), context=contextvars.Context(), name="local replica"
        )

    def open(
        self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any, *, patient: bool = False
    ) -> Any:
        """Begin a call; see Connection."""
        if method.request_streaming:
            return self._plain_grpc().open(method, request, timeout, metadata, compression)
        encode = method.request_serializer
        raw = request if encode is None else encode(request)
        return self._caller.begin(method, raw, timeout, metadata)

    def _plain_grpc(self) -> GrpcConnection:
        """The connection for streams of requests; its server begins to listen now, in the background."""
        if self._grpc is None:
            self._server = grpc.aio.server(options=SERVER_OPTIONS)
            replica = self._replica
            # debug: these callers see exceptions as they do over a lane.
            settings = dataclasses.replace(replica.edge.settings, debug=True)
            edge = Edge(settings, replica.edge.admission, replica.metrics)
            edge.keep_traces_in(replica.edge.traces)
            register(replica.methods, self._server, edge)
            port = self._server.add_insecure_port("127.0.0.1:0")
            self._starting = asyncio.get_running_loop().create_task(self._server.start(), context=contextvars.Context())
            self._grpc = GrpcConnection(f"127.0.0.1:{port}", lambda: None)
        return self._grpc

    def check(self) -> None:
        """Does nothing: the connection is ready until it is closed."""

    async def close(self) -> None:
        """End the calls and the connections."""
        await end_tasks(self._carrier)
        if self._grpc is not None and self._server is not None:
            await self._starting
            await self._grpc.close()
            await self._server.stop(None)

    async def _carry(self) -> None:
        """Pass packets between the two ends until the connection is closed."""
        # Owned by this coroutine: ends in the `finally` below.
        sender = asyncio.get_running_loop().create_task(self._caller.outbox.write_all(self._packets.put))
        try:
            await self._served.serve(self)
        except Exception:
            logger.exception("internal: a local replica ended through a bug in the runtime")
        finally:
            self.ready = False
            await end_tasks(sender)
            self._served.close()
            self._caller.lost("the local replica was closed")
            self._changed()

    async def read(self) -> bytes:
        """The caller's next packet."""
        return await self._packets.get()

    async def write(self, packet: bytes) -> None:
        """The replica's next packet."""
        self._caller.receive(packet)
