"""Requests whose bodies do not come, of every kind, at the real HAProxy: other clients do not notice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import pytest

from tests.contract.test_edge_bounds import honest_clients_are_served
from tests.harness import http2
from tests.harness.edge import Edge, GrpcReplica, service
from tests.harness.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

SLOW = 300
"""Requests that stay open, of which the replica has room for four."""
LENGTH = 100_000


@dataclass(frozen=True)
class Kind:
    """How a request without its body looks. Streams: requests on one connection, numbered 1, 3, 5 ..."""

    head: Callable[[int], bytes]
    body: Callable[[int, bytes], bytes]
    """A piece of the body on the wire."""
    opening: bytes = b""
    """What a connection begins with."""
    streams: int = 1
    port: int = 8000
    begins: bytes = b""
    """The first bytes of every body."""


def http1(framing: str) -> bytes:
    return f"POST /echo/body HTTP/1.1\r\nhost: edge\r\n{framing}\r\n\r\n".encode()


def post(path: str, **more: str) -> Callable[[int], bytes]:
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "edge"}
    return lambda stream: http2.head(stream, fields | {name.replace("_", "-"): value for name, value in more.items()})


KINDS = {
    "length": Kind(lambda _: http1(f"content-length: {LENGTH}"), lambda _, piece: piece),
    "chunked": Kind(
        lambda _: http1("transfer-encoding: chunked"), lambda _, piece: b"%x\r\n%b\r\n" % (len(piece), piece)
    ),
    "h2-length": Kind(post("/echo/body", content_length=str(LENGTH)), http2.data, http2.PREFACE, 100),
    "h2": Kind(post("/echo/body"), http2.data, http2.PREFACE, 100),
    "grpc": Kind(
        post("/test.Echo/Unary", te="trailers", content_type="application/grpc"),
        http2.data,
        http2.PREFACE,
        100,
        9000,
        b"\0" + LENGTH.to_bytes(4, "big"),
    ),
}


@contextlib.asynccontextmanager
async def slow_requests(
    edge: Edge, kind: Kind, sent: int, *, count: int = SLOW, drips: bool = False
) -> AsyncIterator[None]:
    """So many requests with this much of their bodies, then silence; or each gets one byte more, again and again."""
    writers: list[asyncio.StreamWriter] = []
    streams = range(1, 2 * kind.streams, 2)
    body = kind.begins + b"x" * LENGTH

    async def drip() -> None:
        for at in range(LENGTH):
            for writer in writers:
                writer.write(b"".join(kind.body(stream, body[at : at + 1]) for stream in streams))
            await asyncio.sleep(0.1)

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count // kind.streams):
            _, writer = await asyncio.open_connection(edge.container.ip, kind.port)
            stack.callback(writer.transport.abort)
            writers.append(writer)
            first = [kind.head(stream) + (kind.body(stream, body[:sent]) if sent else b"") for stream in streams]
            writer.write(kind.opening + b"".join(first))
            await writer.drain()
        dripping = asyncio.ensure_future(drip()) if drips else None
        try:
            yield
        finally:
            if dripping:
                dripping.cancel()


@pytest.mark.parametrize("drips", [False, True], ids=["nothing comes", "a byte now and then"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
async def test_requests_without_their_bodies_take_no_place_of_a_replica(edge: Edge, kind: Kind, drips: bool) -> None:
    echo = service("echo", max_ongoing_requests=4)
    caller = service("caller", protocol="grpc", route=None, grpc_services=("test.Echo",), max_ongoing_requests=4)
    await edge.route(echo, caller)
    replica = await edge.serve("echo", "echo-1")
    called = GrpcReplica(edge.container.gateway)
    await called.server.start()
    await edge.add("caller", "caller-1", called.address, replica.port)
    try:
        async with slow_requests(edge, kind, 7 if drips else 0, drips=drips):
            await honest_clients_are_served(edge)
            await honest_callers_are_served(edge)
        assert replica.requests == 50, "only whole bodies reach it"
    finally:
        await called.server.stop(None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.port == 8000], ids=list(KINDS)[:4])
async def test_requests_with_the_first_part_of_their_bodies_lose_their_places(edge: Edge, kind: Kind) -> None:
    await edge.route(service("echo", max_ongoing_requests=4))
    replica = await edge.serve("echo", "echo-1")

    async def is_full() -> bool:
        return replica.requests >= 4

    async with slow_requests(edge, kind, 8300):
        await until(is_full, "slow bodies have every place")
        await honest_clients_are_served(edge)
    await until(partial(edge.is_idle, "echo"), "no place is lost for good")


async def honest_callers_are_served(edge: Edge) -> None:
    message = b"x" * 3000
    async with grpc.aio.insecure_channel(f"{edge.container.ip}:9000") as channel:
        call: Any = channel.unary_unary("/test.Echo/Unary")
        assert await asyncio.gather(*(call(message, timeout=PATIENCE_S) for _ in range(50))) == [message] * 50


async def test_a_message_in_two_parts_is_passed_on_once_it_is_whole(edge: Edge) -> None:
    await edge.route(service("caller", protocol="grpc", route=None, grpc_services=("test.Echo",)))
    http = await edge.replica("http-1")
    called = GrpcReplica(edge.container.gateway)
    await called.server.start()
    await edge.add("caller", "caller-1", called.address, http.port)
    hold = post("/test.Echo/Hold", te="trailers", content_type="application/grpc")
    try:
        _, writer = await asyncio.open_connection(edge.container.ip, 9000)
        writer.write(http2.PREFACE + hold(1) + http2.data(1, b"\0\0\0\0\4ab"))
        await writer.drain()
        await honest_callers_are_served(edge)
        assert not called.begun.is_set()
        writer.write(http2.data(1, b"cd"))
        await asyncio.wait_for(called.begun.wait(), PATIENCE_S)
        writer.transport.abort()
    finally:
        await called.server.stop(None)


async def test_a_message_that_does_not_come_is_refused_in_time(edge: Edge) -> None:
    await edge.route(service("caller", protocol="grpc", route=None, grpc_services=("test.Echo",), body_timeout_s=0.3))
    http = await edge.replica("http-1")
    await edge.add("caller", "caller-1", http.address, http.port)
    for begun in (b"", b"\0\0", b"\0\0\0\0\4ab"):
        reader, writer = await asyncio.open_connection(edge.container.ip, 9000)
        writer.write(http2.PREFACE + KINDS["grpc"].head(1) + http2.data(1, begun))
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"did not arrive within its body_timeout_s")
        writer.transport.abort()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
async def test_a_service_that_streams_requests_sees_them_at_once(edge: Edge, kind: Kind) -> None:
    await edge.route(service("echo", streams_requests=True))
    replica = await edge.serve("echo", "echo-1")
    if kind.port == 9000:
        await edge.route(
            service("echo", protocol="grpc", route=None, grpc_services=("test.Echo",), streams_requests=True)
        )

    async def has_come() -> bool:  # the stand-in for a gRPC replica ends the session at once
        return replica.requests == 1 or await edge.sessions_so_far("echo", "echo-1") > 0

    async with slow_requests(edge, replace(kind, streams=1), 0, count=1):
        await until(has_come, "the request has its place")


async def test_a_websocket_over_http2_waits_for_no_body(edge: Edge) -> None:
    await edge.route(service("echo"))
    replica = await edge.serve("echo", "echo-1")
    fields = {":method": "CONNECT", ":protocol": "websocket", ":scheme": "http", ":path": "/echo/socket"}
    _, writer = await asyncio.open_connection(edge.container.ip, 8000)
    writer.write(http2.PREFACE + http2.head(1, fields | {":authority": "edge", "sec-websocket-version": "13"}))

    async def has_come() -> bool:
        return replica.requests == 1

    await until(has_come, "the WebSocket has reached the replica")
    writer.transport.abort()
