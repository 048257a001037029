"""A service with all four kinds of methods, over plain bytes; written by hand in the form that generated code has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from pierhead.calls.channel import HandleChannel
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.server import ReplicaServer

from tests.unit.runtime.harness import Cluster, know, until

NAME = "pierhead.test.Pipes"

LARGE = 300_000
"""Bytes of a message that travels outside a lane."""


class PipesServicer:
    """One method of each kind, One, Split, Join and Talk; messages are bytes."""


def add_PipesServicer_to_server(servicer: Any, server: Any) -> None:
    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(servicer.One, bytes, bytes),
        "Split": grpc.unary_stream_rpc_method_handler(servicer.Split, bytes, bytes),
        "Join": grpc.stream_unary_rpc_method_handler(servicer.Join, bytes, bytes),
        "Talk": grpc.stream_stream_rpc_method_handler(servicer.Talk, bytes, bytes),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_registered_method_handlers(NAME, handlers)


class PipesStub:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.One: Any = channel.unary_unary(f"/{NAME}/One", bytes, bytes)
        self.Split: Any = channel.unary_stream(f"/{NAME}/Split", bytes, bytes)
        self.Join: Any = channel.stream_unary(f"/{NAME}/Join", bytes, bytes)
        self.Talk: Any = channel.stream_stream(f"/{NAME}/Talk", bytes, bytes)
        self.Missing: Any = channel.unary_unary(f"/{NAME}/Missing", bytes, bytes)


class Pipes(PipesServicer):
    """One: the request back, or what its words ask for. Split: `count size`. Join: sizes. Talk: each request back."""

    def __init__(self) -> None:
        self.sent = 0
        self.ended = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def One(self, request: bytes, context: Any) -> bytes:
        word, _, number = request.partition(b" ")
        if word == b"make":
            return b"x" * int(number)
        if word == b"headers":
            await context.send_initial_metadata((("first", "1"), ("raw-bin", b"\x00\xff")))
            context.set_trailing_metadata((("last", "2"), ("raw-bin", b"\x01")))
        if word == b"abort":
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "there is one")
        if word == b"fail":
            raise ValueError("told to")
        if word == b"status":
            context.set_code(grpc.StatusCode.ALREADY_EXISTS)
            context.set_details("there is one")
        if word == b"metadata":
            return repr(sorted((key, value) for key, value in context.invocation_metadata())).encode()
        await self.gate.wait()
        return request

    async def Split(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        count, size = (int(word) for word in request.split())
        try:
            for index in range(count):
                self.sent += 1
                yield index.to_bytes(4, "big") + b"x" * size
        finally:
            self.ended += 1

    async def Join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        total = count = 0
        async for request in requests:
            count += 1
            total += len(request)
        return f"{count} {total}".encode()

    async def Talk(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                if request == b"stop":
                    return
                if request == b"fail":
                    raise ValueError("told to")
                yield request
        finally:
            self.ended += 1


async def numbers(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * size


async def idle(server: ReplicaServer) -> None:
    await until(lambda: server.readiness().ongoing == 0, "nothing is in flight at the replica")


Served = tuple[Any, Any, ReplicaServer]
"""A PipesStub, the Pipes behind it, and the replica."""


async def serve(cluster: Cluster, service: Pipes | None = None, *, transport: str = "lane", **settings: Any) -> Served:
    """A replica, and a handle to it."""
    service = service or Pipes()
    server = await cluster.start(service, **settings)
    know(server, transport=transport)
    return PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics())), service, server
