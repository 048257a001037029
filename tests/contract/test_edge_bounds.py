"""What a few clients cannot take from all others at the real HAProxy: slow bodies, idle WebSockets, floods."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, TCPConnector, WSMsgType, WSServerHandshakeError
from docker.types import Ulimit

from controller.routing.haproxy import HAProxyRouter
from controller.routing.haproxy_socket import RuntimeSocket
from controller.routing.haproxy_state import info_facts
from controller.settings import EdgeLimits
from tests.harness import http2
from tests.harness.edge import Edge, Replica, error_of, service
from tests.harness.haproxy_container import HAProxyContainer
from tests.harness.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

COMPOSE_FILE = Path(__file__).resolve().parents[2] / "compose" / "compose.yaml"
HEAD = b"POST /echo/body HTTP/1.1\r\nhost: edge\r\ncontent-length: %d\r\n\r\n"


class SlowClient:
    """One connection that sends what the test asks for, and reads the answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def status(self) -> int:
        """Status of the answer; 0 = the connection was closed without one."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                line = await self.reader.readline()
            except ConnectionError:
                return 0
        return int(line.split()[1]) if line else 0


@contextlib.asynccontextmanager
async def slow_clients(edge: Edge, count: int, sent: bytes) -> AsyncIterator[list[SlowClient]]:
    """Connections on which nothing comes after `sent`."""
    clients: list[SlowClient] = []
    try:
        for _ in range(count):
            clients.append(SlowClient(*await asyncio.open_connection(edge.container.ip, 8000)))
            clients[-1].writer.write(sent)
            await clients[-1].writer.drain()
        yield clients
    finally:
        for client in clients:
            client.writer.transport.abort()


async def honest_clients_are_served(edge: Edge) -> None:
    async with ClientSession(edge.url, connector=TCPConnector(limit=4)) as session, asyncio.timeout(PATIENCE_S):

        async def one() -> int:
            async with session.post("/echo/body", data=b"x" * 3000) as answer:
                return answer.status

        assert await asyncio.gather(*(one() for _ in range(50))) == [200] * 50


@pytest.mark.parametrize("sent", [HEAD[:30], HEAD % 10 + b"x"], ids=["headers", "body"])
async def test_slow_headers_and_bodies_take_no_place_of_a_replica(edge: Edge, sent: bytes) -> None:
    await edge.route(service("echo", max_ongoing_requests=4))
    replica = await edge.serve("echo", "echo-1")
    async with slow_clients(edge, 300, sent):
        await honest_clients_are_served(edge)
    assert replica.requests == 50, "only whole bodies reach it"


async def test_a_body_that_does_not_come_is_answered_408_in_time(edge: Edge) -> None:
    await edge.route(service("echo", body_timeout_s=0.5))
    replica = await edge.serve("echo", "echo-1")
    async with slow_clients(edge, 20, HEAD % 10 + b"x") as clients:
        assert await asyncio.gather(*(client.status() for client in clients)) == [408] * 20
    assert replica.requests == 0


async def test_bodies_that_make_progress_and_slow_answers_take_their_time(edge: Edge) -> None:
    bound_s = 4.0
    await edge.route(service("echo", body_timeout_s=bound_s))
    replica = await edge.serve("echo", "echo-1")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            await asyncio.sleep(bound_s / 8)
            yield b"x" * 300_000

    async def post(path: str, **request: Any) -> None:
        async with edge.http.post(path, **request) as answer:
            assert answer.status == 200, path

    length = {"content-length": "3000000"}
    bodies = [post("/echo/body", data=pieces(), headers=length), post("/echo/body?in=chunks", data=pieces())]
    answers = asyncio.ensure_future(post("/echo/hold", data=b"x"))
    await asyncio.gather(*bodies)
    assert replica.received == 6_000_000
    replica.let_go.set()
    await answers  # the time for the body is not the time for the answer


async def test_an_idle_websocket_loses_its_place(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(idle_websocket_s=4, client_websockets=0))
    await edge.route(service("echo", max_ongoing_requests=2))
    await edge.serve("echo", "echo-1")
    async with edge.http.ws_connect("/echo/socket") as used, edge.http.ws_connect("/echo/socket") as idle:
        third = asyncio.ensure_future(edge.http.get("/echo"))
        while not third.done():  # it waits for a place
            await asyncio.sleep(0.1)
            await used.send_str("hi")
            assert (await used.receive(timeout=PATIENCE_S)).data == "hi", "one that is used stays open"
        assert (await third).status == 200, "the idle one has left"
        assert (await idle.receive(timeout=PATIENCE_S)).type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)


async def test_connections_of_one_address_are_bounded_where_the_operator_says_so(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(client_connections=5))
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")

    async def is_served_beside(others: int) -> bool:
        try:
            async with slow_clients(edge, others, b""), edge.http.get("/echo") as answer:
                return answer.status == 200
        except (ClientError, ConnectionError):  # closed without an answer
            return False

    async def sixth_is_refused() -> bool:
        """False while the worker from before the reload still accepts some of them."""
        return not await is_served_beside(5)

    await until(sixth_is_refused, "one of six connections is closed without an answer")
    await until(partial(is_served_beside, 4), "five of them have room, once those before have left")


async def test_one_address_cannot_take_the_connections_of_all_others(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(connections=50, client_connections=10))
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    other = 'exec 3<>/dev/tcp/127.0.0.1/8000; printf "GET /echo HTTP/1.0\r\n\r\n" >&3; head -n 1 <&3'
    async with contextlib.AsyncExitStack() as idle:
        for _ in range(60):
            with contextlib.suppress(ConnectionError):  # it has as many as it may
                await idle.enter_async_context(slow_clients(edge, 1, b""))
        answer = await asyncio.to_thread(edge.container.exec, ["timeout", "20", "bash", "-c", other])
        assert b" 200 " in answer.output


async def test_requests_of_one_address_in_flight_are_bounded(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(client_requests=5))
    await edge.route(service("echo"))
    replica = await edge.serve("echo", "echo-1")
    fields = {":method": "GET", ":scheme": "http", ":path": "/echo/hold", ":authority": "edge"}
    requests = b"".join(http2.head(stream, fields, ends=True) for stream in range(1, 11, 2))
    async with slow_clients(edge, 1, http2.PREFACE + requests) as clients:
        await until(partial(_has_requests, replica, 5), "five requests on one connection are in flight")
        status, error, headers = await error_of(edge, "/echo")
        assert (status, error["code"], headers["retry-after"]) == (429, "client_limit", "10")
        clients[0].writer.transport.abort()

        async def is_served() -> bool:
            async with edge.http.get("/echo") as answer:
                return answer.status == 200

        await until(is_served, "there is room once they have ended")


async def _has_requests(replica: Replica, count: int) -> bool:
    return replica.requests == count


def test_haproxy_says_where_it_may_take_fewer_connections_than_allowed(haproxy_image: str, run_dir: Path) -> None:
    files = Ulimit(name="nofile", soft=5000, hard=5000)
    with HAProxyContainer(run_dir, haproxy_image, ulimits=[files]) as container:
        said = b"".join(container.get_logs())
    assert b"it may open 5000 files, enough for 2450 connections, not for the 20000 that are allowed" in said


async def test_requests_of_one_address_are_bounded_where_the_operator_says_so(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(client_requests_per_s=1))
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    for _ in range(10):
        async with edge.http.get("/echo") as answer:
            assert answer.status == 200
    status, error, headers = await error_of(edge, "/echo")
    assert (status, error["code"], headers["retry-after"]) == (429, "client_limit", "10")


async def test_websockets_of_one_address_are_bounded_where_the_operator_says_so(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(client_websockets=2))
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    async with edge.http.ws_connect("/echo/socket"):
        async with edge.http.ws_connect("/echo/socket"):
            with pytest.raises(WSServerHandshakeError) as refused:
                await edge.http.ws_connect("/echo/socket")
            assert refused.value.status == 429
            async with edge.http.get("/echo") as answer:
                assert answer.status == 200, "other requests are not counted"

        async def room_again() -> bool:
            try:
                async with edge.http.ws_connect("/echo/socket"):
                    return True
            except WSServerHandshakeError:
                return False

        await until(room_again, "there is room once one has left")


async def test_websockets_of_one_address_leave_as_many_places_free(edge: Edge) -> None:
    await edge.route(service("echo", max_ongoing_requests=8))
    await edge.serve("echo", "echo-1")
    async with contextlib.AsyncExitStack() as opened:

        async def opens() -> int:
            try:
                await opened.enter_async_context(edge.http.ws_connect("/echo/socket"))
            except WSServerHandshakeError as refused:
                return refused.status
            return 101

        assert [await opens() for _ in range(5)] == [101, 101, 101, 101, 429]
        async with edge.http.get("/echo") as answer:
            assert answer.status == 200, "other requests have room"

    async def all_have_left() -> bool:
        async with edge.http.ws_connect("/echo/socket"), edge.http.ws_connect("/echo/socket") as socket:
            return not socket.closed

    await until(all_have_left, "there is room once they have left")


async def test_a_queue_that_the_service_does_not_bound_is_bounded(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(connections=20))
    await edge.route(service("echo", max_ongoing_requests=1))
    replica = await edge.serve("echo", "echo-1")
    async with ClientSession(edge.url, connector=TCPConnector(limit=0, force_close=True)) as session:

        async def one() -> int:
            async with session.post("/echo/hold") as answer:
                return answer.status

        requests = [asyncio.ensure_future(one())]
        await until(partial(_has_requests, replica, 1), "one request is served")  # else it is among those that wait
        requests += [asyncio.ensure_future(one()) for _ in range(10)]

        async def ten_wait() -> bool:
            return await edge.queued("echo") == 10

        await until(ten_wait, "ten wait")
        status, error, headers = await error_of(edge, "/echo")
        assert (status, error["code"], headers["retry-after"]) == (503, "queue_full", "1")
        replica.let_go.set()
        assert await asyncio.gather(*requests) == [200] * 11


async def test_what_connections_may_be_open_fit_into_haproxys_memory(edge: Edge) -> None:
    """The worst of them: each with a body that does not end, so with a buffer."""
    stack = COMPOSE_FILE.read_text()
    haproxy = stack.partition("\n  haproxy:\n")[2].partition("\n  controller:\n")[0]
    (limit_gb,) = re.findall(r"\n    mem_limit: (\d+)g\n", haproxy)
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    before = await allocated_mb(edge)
    async with slow_clients(edge, 500, HEAD % 100_000 + b"x" * 4000):
        each_mb = (await allocated_mb(edge) - before) / 500
    print(f"a connection takes {each_mb * 1000:.0f} kB of HAProxy's memory")
    # HTTP and gRPC each, and as many of the worker before a reload.
    assert 4 * EdgeLimits().connections * each_mb < int(limit_gb) * 1024


async def allocated_mb(edge: Edge) -> float:
    facts = info_facts(await RuntimeSocket(edge.run_dir / "admin.sock").ask("show info"))
    return float(facts["PoolAlloc_MB"])


async def test_requests_that_are_reset_by_the_thousand_do_not_fill_the_log(edge: Edge) -> None:
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    fields = {":method": "POST", ":scheme": "http", ":path": "/echo/body", ":authority": "edge"}
    streams = range(1, 6001, 2)
    sent = http2.PREFACE + b"".join(http2.head(stream, fields) + http2.reset(stream) for stream in streams)
    async with slow_clients(edge, 1, sent):

        async def all_have_come() -> bool:
            facts = info_facts(await RuntimeSocket(edge.run_dir / "admin.sock").ask("show info"))
            return int(facts["CumReq"]) >= len(streams)

        await until(all_have_come, "HAProxy has read every request")
    lines = await edge.logged(1)
    assert len(lines) < len(streams) / 2

    async def is_logged_again() -> bool:
        await error_of(edge, "/nowhere")
        return any(line["path"] == "/nowhere" for line in await edge.logged(1))

    await until(is_logged_again, "other failures of the address have their lines, once the flood is over")


def _head(path: str, length: int) -> bytes:
    """The head of a request of so many bytes."""
    start = f"GET {path} HTTP/1.1\r\nhost: edge\r\n".encode() + (b"x: " + b"x" * 7000 + b"\r\n") * (length // 7100)
    start += b"x: "
    return start + b"x" * (length - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [(_head("/echo", 15_000), 200), (_head("/echo", 16_400), 400), (_head("/é", 100), 400), (b"\0\1\2\r\n\r\n", 400)],
    ids=["a head of 15 kB", "a head of 16.4 kB", "raw bytes in the path", "no HTTP"],
)
async def test_what_haproxy_cannot_read_gets_its_built_in_page(edge: Edge, sent: bytes, status: int) -> None:
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    async with slow_clients(edge, 1, sent) as clients, asyncio.timeout(PATIENCE_S):
        head = await clients[0].reader.readuntil(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert (b"text/html" in head.lower()) is (status == 400)
