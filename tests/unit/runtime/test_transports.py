"""What holds for calls through a handle whichever way they travel: over a lane, at a port and at a socket, and over
plain gRPC.

What only one of them has is tested where it is: lanes in test_lane_*.py. Everything else runs over lanes alone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from pierhead import DeadlineExceeded, UserCodeError
from pierhead.calls.channel import HandleChannel
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.errors import RemoteError
from pierhead.metrics import RuntimeMetrics
from pierhead.request import CURRENT, RequestContext
from pierhead.trace import TraceSampler

from tests.unit.runtime.harness import Cluster, EchoService, address, echo, know, until
from tests.unit.runtime.pipes import LARGE, Served, idle, numbers, serve


@pytest.fixture(params=["lane", "lane at a socket", "grpc"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def transport(way: str) -> str:
    """What the handles of the test use."""
    return way.partition(" ")[0]


@pytest.fixture
def place(way: str, tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """The settings of one more replica that say where it listens."""
    numbers = itertools.count()
    return lambda: {"socket": str(tmp_path / str(next(numbers)))} if way.endswith("socket") else {}


@pytest.fixture
async def pipes(cluster: Cluster, way: str, transport: str, place: Callable[[], dict[str, Any]]) -> Served:
    served = await serve(cluster, transport=transport, debug=True, **place())
    await served[0].One(b"connect")  # a replica that is not connected when a short deadline is over is another error
    lanes: Any = served[2]._lanes
    assert len(lanes._socket_tasks) == (way == "lane at a socket")
    return served


class TestCalls:
    """Also run, by import, in one process (test_local.py) and with the servicer in a thread (test_user_loop.py)."""

    @pytest.mark.parametrize("size", [0, 1, LARGE, 3_000_000])
    async def test_any_size_there_and_back(self, pipes: Served, size: int) -> None:
        stub, _, server = pipes
        assert await stub.One(b"x" * size) == b"x" * size
        assert await stub.One(b"make %d" % size) == b"x" * size
        await idle(server)

    async def test_metadata_goes_both_ways(self, pipes: Served) -> None:
        stub, _, _ = pipes
        call = stub.One(b"headers", metadata=(("mine", "a"), ("mine-bin", b"\x00\xfe")))
        assert await call == b"headers"
        assert ("first", "1") in tuple(await call.initial_metadata())
        assert ("raw-bin", b"\x00\xff") in tuple(await call.initial_metadata())
        assert ("last", "2") in tuple(await call.trailing_metadata())
        assert ("raw-bin", b"\x01") in tuple(await call.trailing_metadata())
        assert await call.code() is grpc.StatusCode.OK
        seen = await stub.One(b"metadata", metadata=(("mine", "a"), ("mine-bin", b"\x00\xfe")))
        assert b"('mine', 'a')" in seen
        assert b"('mine-bin', b'\\x00\\xfe')" in seen
        assert b"x-request-id" in seen

    @pytest.mark.parametrize("how", [b"status", b"abort"])
    async def test_a_status_of_the_service_s_own_choice_reaches_the_caller(self, pipes: Served, how: bytes) -> None:
        with pytest.raises(RemoteError, match="there is one") as raised:
            await pipes[0].One(how)
        assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert raised.value.http_status == 409

    async def test_a_method_that_is_not_there(self, pipes: Served) -> None:
        with pytest.raises(RemoteError) as raised:
            await pipes[0].Missing(b"")
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await idle(pipes[2])

    @pytest.mark.parametrize(("count", "size"), [(5000, 10), (5, LARGE)])
    async def test_replies_come_whole_and_in_order(self, pipes: Served, count: int, size: int) -> None:
        stub, _, server = pipes
        got = [(message[:4], len(message)) async for message in stub.Split(b"%d %d" % (count, size))]
        assert got == [(number.to_bytes(4, "big"), size + 4) for number in range(count)]
        await idle(server)

    async def test_a_consumer_that_does_not_read_stops_its_own_stream_only(self, pipes: Served) -> None:
        stub, service, server = pipes
        slow = stub.Split(b"30000 1000")
        assert await slow.read() is not grpc.aio.EOF
        before = -1
        while before != service.sent:  # until it has come to a stop
            before = service.sent
            for _ in range(20):
                assert await stub.One(b"another") == b"another"
        assert service.sent < 20_000  # a plain channel holds some more than a lane does
        rest = 1
        while await slow.read() is not grpc.aio.EOF:
            rest += 1
        assert rest == 30_000
        await idle(server)

    async def test_cancelling_the_caller_or_the_call_ends_the_work(self, pipes: Served) -> None:
        stub, service, server = pipes
        service.gate.clear()
        waiting = asyncio.ensure_future(stub.One(b"wait"))
        replies, requests = stub.Split(b"1000000 1000"), stub.Join()
        await replies.read()
        await requests.write(b"1")
        await until(lambda: server.readiness().ongoing == 3, "all are at the replica")
        waiting.cancel()
        replies.cancel()
        requests.cancel()
        await until(lambda: service.ended == 1, "the generator is closed")
        await idle(server)

    @pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 5), (5000, 100), (7, LARGE)])
    async def test_requests_come_from_an_iterator(self, pipes: Served, count: int, size: int) -> None:
        stub, _, server = pipes
        assert await stub.Join(numbers(count, size)) == b"%d %d" % (count, count * size)
        await idle(server)

    async def test_an_iterator_that_fails_ends_the_call(self, pipes: Served) -> None:
        stub, _, server = pipes

        async def failing() -> AsyncIterator[bytes]:
            yield b"1"
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):  # not ReplicaDied: the fault is the caller's own
            await stub.Join(failing())
        await idle(server)

    async def test_each_request_of_a_stream_is_answered(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Talk()
        for index in range(100):
            await call.write(b"%d" % index)
            assert await call.read() == b"%d" % index
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await idle(server)

    async def test_an_exception_of_the_service_arrives_with_its_traceback(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Talk()
        await call.write(b"fail")
        with pytest.raises(UserCodeError, match=r"^ValueError: told to \[error id \w{16}\](\n|$)") as caught:
            await call.read()
        assert 'raise ValueError("told to")' in caught.value.traceback
        assert caught.value.error_id in str(caught.value)
        with pytest.raises(UserCodeError, match="told to"):
            await stub.One(b"fail")
        await idle(server)

    async def test_a_deadline_ends_a_call_of_any_kind(self, pipes: Served) -> None:
        stub, service, server = pipes
        service.gate.clear()
        with pytest.raises(DeadlineExceeded, match=r"One at .*: no reply within 0\.1 s"):
            await stub.One(b"wait", timeout=0.1)
        with pytest.raises(DeadlineExceeded):
            async for _ in stub.Split(b"100000000 10", timeout=0.2):
                pass

        async def join() -> None:
            requests = stub.Join(timeout=0.1)
            await requests.write(b"1")
            await requests

        with pytest.raises(DeadlineExceeded):
            await join()
        await idle(server)


def make(**options: Any) -> tuple[Any, HandleChannel]:
    channel = HandleChannel("echo-child", metrics=RuntimeMetrics(), **options)
    return EchoStub(channel), channel


async def test_a_call_within_a_request_gets_what_the_request_has_left(
    cluster: Cluster, transport: str, place: Callable[[], dict[str, Any]]
) -> None:
    service = EchoService()
    know(await cluster.start(service, **place()), transport=transport)
    stub, _ = make()
    await stub.Echo(echo())  # connected, as above
    trace = TraceSampler().begin(None)
    while len(service.seen) < 2:  # a busy machine: its time was over before it arrived
        CURRENT.set(RequestContext("request-1", time.monotonic() + 0.5, None, trace=trace))
        with pytest.raises(DeadlineExceeded):
            await stub.Echo(echo("wait"), timeout=50)
    seen = service.seen[1]
    assert seen is not None
    assert seen.request_id == "request-1"
    assert seen.trace is not None
    assert seen.trace.trace_id == trace.trace_id
    assert seen.deadline <= time.monotonic() + 0.5


async def test_a_full_replica_s_call_goes_to_another(
    cluster: Cluster, transport: str, place: Callable[[], dict[str, Any]]
) -> None:
    full, free = EchoService("full"), EchoService("free")
    servers = [await cluster.start(full, max_ongoing_requests=1, **place()), await cluster.start(free, **place())]
    async with grpc.aio.insecure_channel(address(servers[0])) as other_process:
        blocked = EchoStub(other_process).Echo(echo("wait"))
        await until(lambda: full.begun == 1, "somebody else fills the first replica")
        know(*servers, transport=transport)
        stub, channel = make(policy="round_robin")
        await until(lambda: sum(replica.callable for replica in channel.pool().replicas()) == 2, "two connections")
        replies = [(await stub.Echo(echo())).response for _ in range(10)]
        assert set(replies) == {"free: hi"}
        assert full.calls == 1, "refused before any work"
        full.gate.set()
        await blocked


class SumServicer:
    """One method, Sum; requests are numbers."""


def add_SumServicer_to_server(servicer: Any, server: Any) -> None:
    handlers = {"Sum": grpc.stream_unary_rpc_method_handler(servicer.Sum, int, bytes)}
    server.add_registered_method_handlers("pierhead.test.Sum", handlers)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pierhead.test.Sum", handlers),))


class Sum(SumServicer):
    async def Sum(self, requests: AsyncIterator[int], context: Any) -> bytes:
        total = 0
        while (number := await context.read()) is not grpc.aio.EOF:
            total += number
        return b"%d" % total


@pytest.mark.parametrize("in_a_thread", [False, True])
async def test_messages_that_a_method_reads_by_its_context_are_decoded(cluster: Cluster, in_a_thread: bool) -> None:
    server = await cluster.start(Sum(), run_user_code_in_separate_thread=in_a_thread)
    async with grpc.aio.insecure_channel(address(server)) as channel:
        call: Any = channel.stream_unary("/pierhead.test.Sum/Sum", bytes, bytes)
        assert await call(iter([b"1", b"20", b"300"])) == b"321"
