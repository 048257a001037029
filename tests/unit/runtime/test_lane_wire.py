"""The two ends of a lane against an other side that is broken, gone, or no Pierhead at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import pytest
from pierhead import NoReplica, ReplicaDied, Settings
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
from pierhead.edge import edge
from pierhead.edge.edge import Reports
from pierhead.held import HeldModels
from pierhead.lane.v1.lane_pb2 import Frame, Goodbye, Hello, Packet, ParcelName
from pierhead.lane.v1.lane_pb2_grpc import LaneStub
from pierhead.lanes import client as lane_caller
from pierhead.lanes import outbox as lane_outbox
from pierhead.lanes import server as lane_server
from pierhead.lanes.client import OPEN, CallerLane, LaneConnection
from pierhead.lanes.connection import CHANNEL_OPTIONS, NEVER_SENT, Method, MethodKind
from pierhead.lanes.outbox import QUEUE_BYTES
from pierhead.lanes.protocol import MAX_PACKET_BYTES
from pierhead.lanes.served import ServedCall
from pierhead.lanes.server import SERVICE, ServedLane
from pierhead.lanes.window import WINDOW_BYTES
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.server import ReplicaServer
from pierhead.routing_stats import Published

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, EchoService, address, echo, know, until
from tests.unit.runtime.pipes import NAME, Pipes, PipesStub, serve

pytestmark = pytest.mark.usefixtures("cluster")  # which closes handles

ONE, SPLIT = f"/{NAME}/One", f"/{NAME}/Split"


def begin(call: int = 1, method: int = 1, path: str = ONE, **more: Any) -> Frame:
    return Frame(call=call, kind=Frame.BEGIN, method=method, path=path, **more)


def hello(window: int = WINDOW_BYTES, **more: Any) -> Packet:
    return Packet(hello=Hello(lane=os.urandom(16), window=window), **more)


class Raw:
    """A caller that says what a test wants it to say."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stream: Any = channel.stream_stream(OPEN)(timeout=20)
        self.hello = hello()

    async def open(self) -> None:
        await self.say(self.hello)
        assert (await self.hear()).hello.window == WINDOW_BYTES

    async def say(self, packet: Packet | bytes) -> None:
        await self.stream.write(packet if isinstance(packet, bytes) else packet.SerializeToString())

    async def hear(self) -> Packet:
        raw = await self.stream.read()
        assert raw is not grpc.aio.EOF
        return Packet.FromString(raw)

    async def end(self) -> Frame:
        """The first END that comes."""
        while True:
            for frame in (await self.hear()).frames:
                if frame.kind == Frame.END:
                    return frame

    async def closed(self) -> tuple[grpc.StatusCode, str]:
        """How the lane ends; what it still says is of no interest."""
        try:
            while await self.stream.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass  # the status is asked for below
        return await self.stream.code(), await self.stream.details()


@dataclass(frozen=True)
class Served:
    """A replica, the servicer in it, and a plain channel to it."""

    server: ReplicaServer
    service: Pipes
    channel: grpc.aio.Channel

    async def take(self, raw: Raw, parcel: int = 1) -> bytes | None:
        """Fetch a large reply of the lane's first call; None where nothing is kept."""
        parcels: Any = LaneStub(self.channel)
        call = parcels.Take(ParcelName(lane=raw.hello.hello.lane, call=1, parcel=parcel))
        return None if await call.code() is grpc.StatusCode.NOT_FOUND else bytes((await call).message)


@pytest.fixture
async def served(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(edge, "HELD", HeldModels())  # the process's own has what other tests left there
    _, service, server = await serve(cluster, max_ongoing_requests=1000)
    async with grpc.aio.insecure_channel(address(server)) as channel:
        yield Served(server, service, channel)


async def test_a_unary_call_takes_two_frames(served: Served) -> None:
    raw = Raw(served.channel)
    await raw.open()
    await raw.say(Packet(frames=[begin(message=b"hi", has_message=True, request_id="abc")]))
    (frame,) = (await raw.hear()).frames
    assert frame == Frame(call=1, kind=Frame.END, message=b"hi", has_message=True, ongoing_plus_one=1)


async def test_names_that_a_caller_invents_make_no_series(cluster: Cluster) -> None:
    _, _, server = await serve(cluster, max_ongoing_requests=1)
    async with grpc.aio.insecure_channel(address(server)) as channel:
        raw = Raw(channel)
        await raw.open()
        await raw.say(Packet(frames=[begin(path=SPLIT, message=b"1000000 1000")]))
        await until(lambda: server.readiness().ongoing == 1, "it is full")
        for call in (2, 3, 4):
            await raw.say(Packet(frames=[begin(call, call, f"/pierhead.test.Pipes/Invented{call}", message=b"")]))
            assert (await raw.end()).status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert server.metrics.requests.values[("unmatched", "RESOURCE_EXHAUSTED")] == 3


async def test_a_stream_of_requests_is_no_call_of_a_lane(served: Served) -> None:
    """An older caller may try, and continues with its messages until it reads the answer."""
    raw = Raw(served.channel)
    await raw.open()
    rest = [Frame(call=1, kind=Frame.MESSAGE, message=b"x"), Frame(call=1, kind=3)]  # type: ignore[arg-type]
    await raw.say(Packet(frames=[begin(path=f"/{NAME}/Talk"), *rest]))
    assert (await raw.end()).status == grpc.StatusCode.UNIMPLEMENTED.value[0]
    await raw.say(Packet(frames=[begin(call=2, method=2, message=b"the lane continues")]))
    assert (await raw.end()).message == b"the lane continues"


STAY = begin(path=SPLIT, message=b"1000000 1000")
"""A call that does not end by itself."""

BROKEN: dict[str, tuple[Packet | bytes, str]] = {
    "no packet": (b"\xff\xff\xff", "3 bytes that are no packet"),
    "a truncated packet": (Packet(frames=[begin(message=b"x" * 100)]).SerializeToString()[:-7], "no packet"),
    "an oversized packet": (bytes(MAX_PACKET_BYTES + 1), "at most 4194304 are taken"),
    "a second hello": (hello(), "a second hello"),
    "a call that was never begun": (
        Packet(frames=[Frame(call=9, kind=Frame.CANCEL)]),
        "a frame for call 9; the last one begun is 0",
    ),
    "call zero": (Packet(frames=[begin(call=0)]), "call 0 begins after call 0"),
    "the same call twice": (Packet(frames=[begin(), begin(method=1, path="")]), "call 1 begins after call 1"),
    "a method without a name": (Packet(frames=[begin(method=3, path="")]), "method 3 was never named"),
    "a method out of order": (Packet(frames=[begin(method=7)]), "method 7 is named after 0 others"),
    "a frame of no kind": (Packet(frames=[STAY, Frame(call=1)]), "a frame of kind 0, which callers do not send"),
    "a frame that replicas send": (Packet(frames=[STAY, Frame(call=1, kind=Frame.END)]), "of kind 7"),
    "a second request": (Packet(frames=[STAY, Frame(call=1, kind=Frame.MESSAGE, message=b"more")]), "of kind 2"),
    "half a pair of metadata": (Packet(frames=[begin(metadata=["key"])]), "keys and values in turn, found 1 strings"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_rule_broken_ends_that_lane_and_nothing_else(served: Served, name: str) -> None:
    server, service, channel = served.server, served.service, served.channel
    service.gate.clear()
    packet, reason = BROKEN[name]
    good, bad = Raw(channel), Raw(channel)
    await good.open()
    await good.say(Packet(frames=[begin(message=b"survives", has_message=True)]))
    await bad.open()
    await bad.say(packet)
    status, details = await bad.closed()
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("lane: ")
    assert reason in details
    await until(lambda: server.readiness().ongoing == 1, "only the good lane's call is in flight")
    service.gate.set()
    assert (await good.end()).message == b"survives"
    await until(lambda: server.readiness().ongoing == 0, "nothing is in flight")


@pytest.mark.parametrize("first", [Packet(), Packet(hello=Hello(window=5)), Packet(hello=Hello(lane=b"x")), b"\xff"])
async def test_a_first_packet_without_a_hello(served: Served, first: Packet | bytes) -> None:
    raw = Raw(served.channel)
    await raw.say(first)
    status, details = await raw.closed()
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("lane: ")


async def test_two_lanes_of_one_name(served: Served) -> None:
    one, other = Raw(served.channel), Raw(served.channel)
    await one.open()
    await other.say(one.hello)
    assert await other.closed() == (grpc.StatusCode.INVALID_ARGUMENT, "lane: another lane has the same name")
    await one.say(Packet(frames=[begin(message=b"still there")]))
    assert (await one.end()).message == b"still there"


async def test_a_large_reply_is_kept_until_it_is_fetched_or_its_caller_cancels(served: Served) -> None:
    for cancels in (False, True):
        raw = Raw(served.channel)
        await raw.open()
        await raw.say(Packet(frames=[begin(message=b"make 300000")]))
        end = await raw.end()
        assert (end.parcel, end.bytes, end.message) == (1, 300_000, b"")
        assert await served.take(raw, parcel=2) is None
        if cancels:
            await raw.say(Packet(frames=[Frame(call=1, kind=Frame.CANCEL), begin(call=2, path="")]))
            await raw.end()  # so the cancellation has arrived
        else:
            assert await served.take(raw) == b"x" * 300_000
        assert await served.take(raw) is None


async def test_a_lane_that_ends_in_order_waits_for_its_large_replies_and_begins_nothing_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(lane: ServedLane, context: Any) -> None:
        await serve_lane(lane, context)
        await asyncio.sleep(0.05)  # a busy machine: the stream ends after the server began to stop

    serve_lane = ServedLane.serve
    monkeypatch.setattr(ServedLane, "serve", busy)
    monkeypatch.setattr(lane_server, "GOODBYE_S", PATIENCE_S)
    raw = Raw(served.channel)
    await raw.open()
    await raw.say(Packet(frames=[begin(message=b"make 300000")]))
    assert (await raw.end()).parcel == 1
    served.server.stop()
    assert (await raw.hear()).goodbye.last_call == 1
    await raw.say(Packet(frames=[begin(call=2, path="", message=b"it crosses the goodbye")]))
    assert await served.take(raw) == b"x" * 300_000
    assert await raw.closed() == (grpc.StatusCode.OK, "")
    assert served.server.metrics.requests.values == {(ONE[1:], "OK"): 1}


async def test_a_call_that_waited_for_its_place_has_a_context_of_its_own(cluster: Cluster) -> None:
    of_request: ContextVar[bytes] = ContextVar("of_request", default=b"")

    class Remembers(Pipes):
        async def One(self, request: bytes, context: Any) -> bytes:
            before = of_request.get()
            of_request.set(request)
            await self.gate.wait()
            return before

    service = Remembers()
    service.gate.clear()
    server = await cluster.start(service, max_ongoing_requests=1)
    async with grpc.aio.insecure_channel(address(server)) as channel:
        one, other = Raw(channel), Raw(channel)
        await one.open()
        await other.open()
        await one.say(Packet(frames=[begin(message=b"one")]))
        await until(lambda: server.readiness().ongoing == 1, "one is in flight")
        await other.say(Packet(frames=[begin(message=b"other", patient=True)]))
        await other.say(Packet(frames=[begin(call=2, path="")]))
        await other.end()  # refused, as the other one waits by now
        service.gate.set()
        assert (await one.end()).message == b""
        assert (await other.end()).message == b""


async def test_nothing_is_read_from_a_caller_that_never_reads(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_outbox, "QUEUE_BYTES", QUEUE_BYTES // 8)  # tens of thousands of calls take seconds
    stub, service, server = await serve(cluster, max_ongoing_requests=1)
    service.gate.clear()
    blocked = asyncio.ensure_future(stub.One(b"it fills the replica"))
    await until(lambda: server.readiness().ongoing == 1, "it is full")
    refused = server.metrics.refused.values

    async def ask(raw: Raw) -> None:
        for start in range(1, 10**9, 1000):
            names = [begin(call=start + more, path=ONE if start + more == 1 else "") for more in range(1000)]
            await raw.say(Packet(frames=names))

    async with grpc.aio.insecure_channel(address(server)) as channel:
        await (raw := Raw(channel)).open()
        asking = asyncio.create_task(ask(raw))
        await (other := Raw(channel)).open()
        quiet, call, before = 0, 0, 0.0
        async with asyncio.timeout(PATIENCE_S):
            while quiet < 20:  # calls of another lane continue during it
                call += 1
                await other.say(Packet(frames=[begin(call=call, path=ONE if call == 1 else "")]))
                assert (await other.end()).status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                now = refused.get(("overloaded",), 0) - call
                quiet, before = (quiet + 1 if 0 < before == now else 0), now
        asking.cancel()
        await asyncio.wait([asking])
    service.gate.set()
    await blocked


async def test_random_packets_harm_nobody(served: Served) -> None:
    """Valid packets, mutated: bytes flipped, cut, doubled, frames in any order with any numbers."""
    server, channel = served.server, served.channel
    rng = Random(7)
    know(server)
    stub = PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics()))
    ends: dict[grpc.StatusCode, int] = {}
    for _ in range(300):
        raw = Raw(channel)
        await raw.open()
        try:
            for _ in range(rng.randrange(1, 6)):
                await raw.say(mutated(rng))
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # it was closed in between
        await raw.stream.done_writing()
        status, details = await raw.closed()
        if details == "Internal error from Core":
            continue  # what gRPC makes of a write that meets the end of its stream
        ends[status] = ends.get(status, 0) + 1
        assert status in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), details
        assert await stub.One(b"between") == b"between"
    assert ends.keys() == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    await until(lambda: server.readiness().ongoing == 0, "nothing is in flight")


def mutated(rng: Random) -> bytes:
    kinds = list(Frame.Kind.values())
    frames = [
        Frame(
            call=rng.choice([0, 1, 2, 3, 4, 2**40]),
            kind=rng.choice(kinds),
            message=rng.randbytes(rng.choice([0, 5, 500])),
            has_message=rng.random() < 0.5,
            parcel=rng.choice([0, 0, 0, 1]),
            bytes=rng.choice([0, 0, 100, 2**60]),
            method=rng.choice([1, 1, 2, 9]),
            path=rng.choice(["", ONE, SPLIT, "/no/such"]),
            timeout_us=rng.choice([0, 1, 10**6, 2**63]),
            metadata=rng.choice([[], ["k", "v"], ["k"], ["k-bin", "!"]]),
            request_id=rng.choice(["", "id", "\n"]),
        )
        for _ in range(rng.randrange(4))
    ]
    raw = bytearray(Packet(frames=frames).SerializeToString())
    if raw and rng.random() < 0.3:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.1:
        raw = raw[: rng.randrange(len(raw) + 1)]
    return bytes(raw * (2 if rng.random() < 0.1 else 1))


# ---- the caller's end, against replicas of all sorts

Behaviour = Callable[[Any], Awaitable[None]]


@asynccontextmanager
async def replica(behave: Behaviour, port: int = 0) -> AsyncIterator[str]:
    """A server that serves `Open` as a test wants it."""

    async def open_(_: object, context: Any) -> None:
        await behave(context)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Open": grpc.stream_stream_rpc_method_handler(open_)}),)
    )
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)


def caller(*addresses: str) -> Any:
    Clients.use(Settings(static={"ECHO_CHILD": addresses}))
    return PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics()))


async def greet(context: Any) -> None:
    await context.read()
    await context.write(Packet(hello=Hello(window=WINDOW_BYTES)).SerializeToString())


NONSENSE: dict[str, Packet | bytes] = {
    "no packet": b"\xff",
    "too large": bytes(MAX_PACKET_BYTES + 1),
    "a second hello": hello(),
    "a call that was not begun": Packet(frames=[Frame(call=5, kind=Frame.END)]),
    "a frame that callers send": Packet(frames=[Frame(call=1, kind=Frame.CANCEL)]),
    "a message of a call with one reply": Packet(frames=[Frame(call=1, kind=Frame.MESSAGE, message=b"x")]),
    "half a pair of metadata": Packet(frames=[Frame(call=1, kind=Frame.END, metadata=["x"])]),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_replica_that_talks_nonsense_loses_the_lane_at_once(name: str) -> None:
    answer = NONSENSE[name]

    async def behave(context: Any) -> None:
        await greet(context)
        await context.read()
        await context.write(answer if isinstance(answer, bytes) else answer.SerializeToString())
        await asyncio.Event().wait()

    async with replica(behave) as where:
        stub = caller(where)
        with pytest.raises(ReplicaDied):
            async with asyncio.timeout(PATIENCE_S):
                await stub.One(b"1", timeout=30)


async def leave(context: Any, last_call: int) -> None:
    """Take the first packet, and end the lane in order."""
    await greet(context)
    await context.read()
    await context.write(Packet(goodbye=Goodbye(last_call=last_call)).SerializeToString())


async def test_calls_beyond_the_goodbye_go_elsewhere(cluster: Cluster) -> None:
    """The first lane takes nothing up and says so; the call is made again, the second time for good."""
    lanes = 0

    async def behave(context: Any) -> None:
        nonlocal lanes
        lanes += 1
        await leave(context, 0)

    real = await cluster.start(Pipes())
    async with replica(behave) as leaving:
        stub = caller(leaving, address(real))
        pool = Clients.current().pool("echo-child", "lane")
        await until(lambda: sum(known.callable for known in pool.replicas()) == 2, "both can be called")
        assert all(await asyncio.gather(*[stub.One(b"%d" % index) for index in range(20)]))
    assert lanes > 0


async def test_calls_up_to_the_goodbye_may_have_been_begun() -> None:
    async with replica(lambda context: leave(context, 1)) as where:
        with pytest.raises(ReplicaDied):
            await caller(where).One(b"1")


async def test_a_lane_that_ends_as_cancelled_is_opened_again() -> None:
    lanes = 0

    async def behave(context: Any) -> None:
        nonlocal lanes
        lanes += 1
        if lanes < 3:
            await context.abort(grpc.StatusCode.CANCELLED, "by a proxy, say")
        await greet(context)
        await context.read()
        end = Frame(call=1, kind=Frame.END, message=b"here", has_message=True)
        await context.write(Packet(frames=[end]).SerializeToString())
        await asyncio.Event().wait()

    async with replica(behave) as where:
        assert await caller(where).One(b"1", timeout=10) == b"here"


async def test_a_replica_that_never_says_hello_is_not_called() -> None:
    async def behave(context: Any) -> None:
        await context.read()
        await asyncio.Event().wait()

    async with replica(behave) as where:
        with pytest.raises(NoReplica):
            await caller(where).One(b"1", timeout=0.3)


async def test_a_lane_closes_also_when_grpc_swallows_the_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As grpc.aio does where it meets a stream that is set up while its server ends."""
    begun, live = asyncio.Event(), LaneConnection._live

    async def swallows(connection: LaneConnection, lane: CallerLane) -> str:
        try:
            return await live(connection, lane)
        except asyncio.CancelledError:
            return "it ended"

    async def behave(context: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(LaneConnection, "_live", swallows)
    async with replica(behave) as where:
        connection = LaneConnection(where, lambda: None)
        await begun.wait()
        async with asyncio.timeout(PATIENCE_S):
            await connection.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == f"lane {where}"]


class Foreign(echo_pb2_grpc.EchoServicer):
    """A gRPC service that was not built on the runtime."""

    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        return echo_pb2.EchoReply(response=f"foreign: {request.message}")

    def Generate(self, request: echo_pb2.GenerateRequest, context: Any) -> AsyncIterator[echo_pb2.Token]:
        raise NotImplementedError


async def foreign_at(port: int, *options: tuple[str, int]) -> tuple[grpc.aio.Server, HandleChannel, Any]:
    """Such a service that has answered a handle once: its server, the handle's channel and its stub."""
    foreign = grpc.aio.server(options=options)
    echo_pb2_grpc.add_EchoServicer_to_server(Foreign(), foreign)
    foreign.add_insecure_port(f"127.0.0.1:{port}")
    await foreign.start()
    Clients.use(Settings(static={"ECHO_CHILD": (f"127.0.0.1:{port}",)}))
    channel = HandleChannel("echo-child", metrics=RuntimeMetrics())
    stub: Any = echo_pb2_grpc.EchoStub(channel)
    assert (await stub.Echo(echo())).response == "foreign: hi"
    return foreign, channel, stub


class Ours(EchoService):
    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        return echo_pb2.EchoReply(response="by a lane" if isinstance(context, ServedCall) else "by plain gRPC")


async def test_a_replica_without_lanes_is_called_by_plain_grpc_until_one_with_lanes_takes_its_place(
    cluster: Cluster, free_port: int
) -> None:
    foreign, channel, stub = await foreign_at(free_port)
    await foreign.stop(0)
    await until(lambda: not channel.pool().has_callable, "its end is noticed")
    await cluster.start(Ours(), port=free_port)
    assert (await stub.Echo(echo(), timeout=10)).response == "by a lane"


@pytest.mark.long
async def test_a_server_that_allows_few_pings_keeps_the_connection_of_a_handle(free_port: int) -> None:
    """As every gRPC server does by default; it ends connections with more."""
    foreign, channel, stub = await foreign_at(free_port, ("grpc.http2.max_ping_strikes", 1))
    lost = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}", options=CHANNEL_OPTIONS) as ours:
        await ours.channel_ready()
        await ours.wait_for_state_change(grpc.ChannelConnectivity.READY)  # two pings, then the server ends it
    assert not lost.done()
    lost.cancel()
    assert (await stub.Echo(echo())).response == "foreign: hi"
    await foreign.stop(0)


async def test_models_and_published_numbers_are_sent_once_and_again_when_they_change(served: Served) -> None:
    held, stats = HeldModels(), Published(lambda: 0.0)
    served.server.edge.reports = Reports(held, stats)
    held.add("a/b")
    raw = Raw(served.channel)
    await raw.open()
    sent = []
    for call in range(1, 6):
        if call == 2:
            stats.publish({"running": 2})
        if call == 4:
            held.add("c")
            stats.publish({"running": 4})
        await raw.say(Packet(frames=[begin(call=call, path=ONE if call == 1 else "", message=b"hi")]))
        sent.append(list((await raw.end()).metadata))
    assert sent == [
        ["pierhead-models", "a%2Fb"],
        ["pierhead-stats", "1;running=2"],
        [],
        ["pierhead-models", "c,a%2Fb", "pierhead-stats", "2;running=4"],
        [],
    ]


@pytest.mark.parametrize("large", [False, True], ids=["small reply", "large reply"])
async def test_what_an_end_tells_of_the_replica_is_learnt_though_nobody_waits_for_it(large: bool) -> None:
    """It crosses a cancellation, and is not told again."""
    lane = CallerLane(_not_beside)
    method = Method(MethodKind.UNARY_UNARY, ONE, None, None, False)
    ended, asks = (lane.begin(method, b"", PATIENCE_S, ()) for _ in range(2))
    end = Frame(call=1, kind=Frame.END, has_message=True, parcel=int(large), metadata=["pierhead-models", "a"])
    if large:  # it has begun to be fetched
        lane.receive(Packet(frames=[end]).SerializeToString())
        ended.cancel()
    else:
        ended.cancel()
        lane.receive(Packet(frames=[end]).SerializeToString())
    lane.receive(
        Packet(frames=[Frame(call=2, kind=Frame.END, has_message=True, ongoing_plus_one=1)]).SerializeToString()
    )
    assert await asks == b""
    assert ("pierhead-models", "a") in tuple(await asks.trailing_metadata())


def _not_beside() -> Any:
    raise AssertionError("nothing of this lane is fetched")


async def test_no_call_is_begun_where_too_much_waits_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that takes nothing more: what has piled up for it stays bounded, also when callers give up waiting."""
    monkeypatch.setattr(lane_caller, "CALLER_QUEUE_BYTES", 1_000_000)

    async def behave(context: Any) -> None:
        await greet(context)
        await asyncio.Event().wait()

    async with replica(behave) as where:
        connection = lane_caller.LaneConnection(where, lambda: None)
        await until(lambda: connection.ready, "the lane is open")
        method = Method(MethodKind.UNARY_UNARY, ONE, bytes, bytes, False)
        calls = [connection.open(method, b"x" * 100_000, 30, (), None) for _ in range(100)]
        ended = [call for call in calls if call.done()]
        assert len(ended) > 80
        with pytest.raises(grpc.aio.AioRpcError, match=NEVER_SENT):
            await ended[-1]
        await connection.close()
