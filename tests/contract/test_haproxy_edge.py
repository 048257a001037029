"""What clients see of the real HAProxy: routes, refusals, queues, health, logs, gRPC, and nothing of scaling."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, TCPConnector

from controller.errors import RoutingUnreachable
from controller.model.actions import AddServer
from controller.model.spec import AccessLog, BackpressureAnswer, ProbeSpec
from controller.routing import haproxy_config
from controller.routing.haproxy import HAProxyRouter
from controller.settings import EdgeLimits
from tests.harness import http2
from tests.harness.edge import (
    LARGE,
    Edge,
    GrpcReplica,
    Load,
    Replica,
    error_of,
    metadata_of,
    posted,
    refusal,
    service,
    with_probe_port,
)
from tests.harness.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine


KILLED = 137
"""Exit status of a container that SIGKILL has ended."""


# ---------------------------------------------------------------------------------------------------------------- http


async def test_health_routes_and_unknown_routes(edge: Edge) -> None:
    async def health() -> tuple[int, Any]:
        async with edge.http.get("/-/healthz") as answer:
            return answer.status, await answer.json()

    assert await health() == (200, {"status": "ok"})
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(shows_routes=True))
    await edge.route(service("echo"), service("b", route="/a/b"))
    status, error, headers = await error_of(edge, "/-/healthz")
    assert (status, error["code"], headers["retry-after"]) == (503, "no_replica", "1")
    await edge.serve("echo", "echo-1")
    assert await health() == (200, {"status": "ok"})
    async with edge.http.get("/-/routes") as answer:
        assert (answer.status, await answer.json()) == (200, {"/echo": "echo", "/a/b": "b"})
    for path in ("/nowhere", "/echoes", '/a"b', "/a%22b\\c", "/ä/%0a"):
        status, error, _ = await error_of(edge, path)
        assert (status, error["code"]) == (404, "route_not_found")
        assert error["message"].endswith("The routes are /echo, /a/b.")
        assert error["routes"] == {"/echo": "echo", "/a/b": "b"}


async def test_the_longest_prefix_decides_and_is_stripped_where_the_service_says_so(edge: Edge) -> None:
    v1 = service("v1", route="/api/v1.0", strip_prefix=True)
    await edge.route(service("root", route="/"), service("a"), service("ab", route="/a/b"), v1)
    for name in ("root", "a", "ab", "v1"):
        await edge.serve(name, name)
    for path, expected in {
        "/": ("root", "/"),
        "/ax": ("root", "/ax"),
        "/api/v1x0/y": ("root", "/api/v1x0/y"),
        "/a": ("a", "/a"),
        "/a?x=/a/b": ("a", "/a"),
        "/a/bc": ("a", "/a/bc"),
        "/a/b": ("ab", "/a/b"),
        "/a/b/c": ("ab", "/a/b/c"),
        "/api/v1.0": ("v1", "/"),
        "/api/v1.0/": ("v1", "/"),
        "/api/v1.0/x/y?z=1": ("v1", "/x/y"),
    }.items():
        async with edge.http.get(path) as answer:
            seen = await answer.json()
            assert (seen["replica"], seen["path"]) == expected, path


async def test_headers_that_a_replica_and_a_client_get(edge: Edge) -> None:
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    for sent, is_kept in (("abc-123", True), (None, False), ('a"b', False), ("x" * 129, False)):
        async with edge.http.get("/echo", headers={"x-request-id": sent} if sent else {}) as answer:
            got, headers = answer.headers["x-request-id"], (await answer.json())["headers"]
            assert got
            assert (headers["x-request-id"], got == sent) == (got, is_kept)
    assert headers["x-forwarded-for"] == edge.container.gateway
    assert headers["x-forwarded-proto"] == "http"
    assert headers["x-forwarded-host"] == f"{edge.container.ip}:8000"
    async with edge.http.get("/echo", headers={"x-forwarded-prefix": "/admin"}) as answer:
        assert "x-forwarded-prefix" not in (await answer.json())["headers"]
    before = time.time()
    async with edge.http.get("/echo", headers={"x-request-start": "t=1"}) as answer:
        start = (await answer.json())["headers"]["x-request-start"]
    assert before - 0.01 <= int(start.removeprefix("t=")) / 1e6 <= time.time()


@pytest.mark.parametrize("network", ["", "203.0.113.0/24", "gateway"])
async def test_what_clients_say_of_themselves_is_removed_unless_a_trusted_proxy_says_it(
    edge: Edge, network: str
) -> None:
    client = edge.container.gateway
    networks = (f"{client}/32", "203.0.113.0/24") if network == "gateway" else tuple(filter(None, [network]))
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(trusted_proxies=networks))
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    said = {
        "X-Forwarded-For": "192.0.2.1",
        "x-forwarded-proto": "https",
        "X-FORWARDED-HOST": "shop.example",
        "x-forwarded-port": "443",
        "x-forwarded-user": "root",
        "Forwarded": "for=192.0.2.1;proto=https",
        "X-Real-IP": "192.0.2.1",
    }
    async with edge.http.get("/echo", headers=[*said.items(), ("x-forwarded-for", "192.0.2.2")]) as answer:
        seen = (await answer.json())["headers"]
    got = {name: text for name, text in seen.items() if "forwarded" in name or name == "x-real-ip"}
    if network == "gateway":
        # Of a header with several lines the replica shows the last one.
        assert got == {name.lower(): text for name, text in said.items()} | {"x-forwarded-for": client}
    else:
        host = f"{edge.container.ip}:8000"
        assert got == {"x-forwarded-for": client, "x-forwarded-proto": "http", "x-forwarded-host": host}


async def test_a_request_that_a_replica_has_begun_is_not_repeated(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy_config, "SERVER_TIMEOUT_SLACK_S", 0.0)
    await edge.route(service("echo"), service("late", request_timeout_s=0.3))
    replicas = [await edge.serve(name, f"{name}-{n}") for name in ("echo", "late") for n in range(2)]
    for path, wanted in {"/echo/die": (502, "bad_gateway"), "/late/hold": (504, "gateway_timeout")}.items():
        status, error, _ = await error_of(edge, path, method="POST")
        assert (status, error["code"]) == wanted
    assert sum(replica.requests for replica in replicas) == 2


@pytest.mark.parametrize(
    ("backpressure", "status", "retry_after"),
    [(BackpressureAnswer(), 503, "1"), (BackpressureAnswer(429, 2.5), 429, "3")],
)
async def test_a_full_queue_refuses_while_those_before_wait(
    edge: Edge, backpressure: BackpressureAnswer, status: int, retry_after: str
) -> None:
    """And what waits too long is refused."""
    limits = {"max_ongoing_requests": 1, "max_queued_requests": 1, "request_timeout_s": 5.0}
    await edge.route(service("echo", backpressure=backpressure, **limits))
    replica = await edge.serve("echo", "echo-1")
    async with edge.busy("echo", replica):
        waiting = asyncio.ensure_future(edge.http.post("/echo"))
        await until(lambda: edge.queued("echo"), "the second request is in the queue")
        found, error, headers = await error_of(edge, "/echo")
        assert (found, error["code"], headers["retry-after"]) == (status, "queue_full", retry_after)
    assert (await waiting).status == 200
    await edge.route(service("echo", backpressure=backpressure, **limits | {"request_timeout_s": 0.5}))
    async with edge.busy("echo", replica):
        found, error, headers = await error_of(edge, "/echo")
        assert (found, error["code"], headers["retry-after"]) == (status, "overloaded", retry_after)
        assert replica.requests == 3


async def test_a_client_that_leaves_gives_up_its_place(edge: Edge) -> None:
    await edge.route(service("echo", max_ongoing_requests=1))
    replica = await edge.serve("echo", "echo-1")
    held = asyncio.ensure_future(edge.http.post("/echo/hold"))
    await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
    held.cancel()
    await until(lambda: edge.is_idle("echo"), "the replica is free again")


# -------------------------------------------------------------------------------------------------- health and servers


async def test_haproxy_takes_a_server_out_and_back_by_its_own_checks(edge: Edge) -> None:
    first = await edge.replica("echo-1")
    await edge.route(with_probe_port(service("echo"), first.port))
    await edge.add("echo", "echo-1", first.address)
    await first.stop()

    async def down() -> bool:
        return not await edge.is_up("echo-1")

    await until(down, "HAProxy takes it out by itself")
    await first.start()
    await until(lambda: edge.is_up("echo-1"), "HAProxy takes it back by itself")


async def test_a_replica_that_went_away_costs_no_request(edge: Edge) -> None:
    await edge.route(service("echo"))
    replicas = [await edge.serve("echo", f"echo-{n}") for n in range(2)]
    await replicas[0].stop()
    for _ in range(20):
        async with edge.http.get("/echo") as answer:
            assert (answer.status, (await answer.json())["replica"]) == (200, "echo-1")


@pytest.mark.parametrize("protocol", [{}, {"protocol": "grpc", "route": None, "grpc_services": ("test.Echo",)}])
async def test_where_nothing_is_asked_servers_that_connect_are_up(edge: Edge, protocol: dict[str, Any]) -> None:
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
            return [(server.up, server.is_asked) for server in state.servers] == list(wanted)

        return look

    await until(seen_as((False, True), (False, True)), "neither answers what it is asked")
    await edge.route(silent)
    await until(seen_as((True, False), (False, True)), "the one that takes connections is up")
    await edge.route(asked)
    await until(seen_as((False, True), (False, True)), "neither answers what it is asked again")


async def test_a_restarted_haproxy_serves_at_once_and_continues_checking(edge: Edge) -> None:
    async with grpc_edge(edge) as (_, channel):
        await asyncio.to_thread(edge.container.kill_and_wait)
        call = channel.unary_unary("/test.Echo/Unary")(b"x", wait_for_ready=True, timeout=PATIENCE_S)
        assert await call == b"x"

        async def checked() -> bool:
            return (
                'haproxy_server_check_status{proxy="svc_echo",server="echo-1",state="L7OK"} 1' in await edge.metrics()
            )

        await until(checked, "HAProxy has checked echo-1 itself and found it well")
        assert await edge.is_up("echo-1")


async def test_a_haproxy_that_hangs_is_silent_and_one_that_is_gone_is_not(edge: Edge) -> None:
    router = HAProxyRouter(edge.run_dir, http=(edge.container.ip, 8000))
    refuses = HAProxyRouter(edge.run_dir, http=(edge.container.ip, 8001))

    async def says_something(router: HAProxyRouter) -> bool:
        return not await router.http_is_silent()

    await until(partial(says_something, router), "it answers")
    with edge.container.hanging():
        assert await router.http_is_silent()
        with pytest.raises(RoutingUnreachable):
            await router.observe()
    await until(partial(says_something, router), "it answers again")
    await until(partial(says_something, refuses), "a refusal is an answer")


async def test_docker_stop_waits_for_requests_and_not_for_idle_connections(edge: Edge) -> None:
    await edge.route(service("echo"))
    replica = await edge.serve("echo", "echo-1")
    large = b"GET /echo/large HTTP/1.0\r\n\r\n"
    async with ClientSession(edge.url) as idle:
        async with idle.get("/echo") as answer:
            assert answer.status == 200
        with (
            _client(edge, 9000, http2.PREFACE),
            _client(edge, 8000, large) as slow_reader,
        ):
            await until(partial(_has_answered, replica, edge), "HAProxy has the large answer")
            held = asyncio.ensure_future(edge.http.post("/echo/hold"))
            await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
            stopping = asyncio.ensure_future(asyncio.to_thread(edge.container.end))
            await until(partial(_refuses, edge), "new connections are refused")
            replica.let_go.set()
            assert (await held).status == 200
            assert len(await asyncio.to_thread(_all_of, slow_reader)) > LARGE
            assert await stopping != KILLED, "it ends once it has no request"


@contextlib.contextmanager
def _client(edge: Edge, port: int, begin: bytes) -> Iterator[socket.socket]:
    """A connection that has sent this, and takes 4 kB of an answer before it is read."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect((edge.container.ip, port))
        client.sendall(begin)
        yield client


async def _has_answered(replica: Replica, edge: Edge) -> bool:
    return replica.requests == 2 and await edge.is_idle("echo")


async def _refuses(edge: Edge) -> bool:
    try:
        _, writer = await asyncio.open_connection(edge.container.ip, 8000)
    except OSError:
        return True
    writer.close()
    return False


def _all_of(connection: socket.socket) -> bytes:
    """What arrives until the other side ends the connection."""
    return b"".join(iter(partial(connection.recv, 65536), b""))


# -------------------------------------------------------------------------------------------------------- observability


def logged_as(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """In the order of paths: HAProxy's threads log in any order."""
    return sorted((line["path"], line["service"], line["replica"], line["status"]) for line in lines)


async def test_access_log_metrics_and_statistics(edge: Edge) -> None:
    await edge.route(service("echo", access_log=AccessLog(sample=1)))
    await edge.serve("echo", "echo-1")
    paths = ["/echo/x?secret=1", '/echo/"quoted"\\', "/nowhere", "/-/healthz"]
    for path in paths:
        async with edge.http.get(path, headers={"x-request-id": f"id-{len(path)}"}):
            pass
    lines = await edge.logged(3)
    assert logged_as(lines) == [
        ("/echo/%22quoted%22%5C", "echo", "echo-1", 200),
        ("/echo/x", "echo", "echo-1", 200),
        ("/nowhere", "", "<NOSRV>", 404),
    ]
    (line,) = (line for line in lines if line["path"] == "/echo/x")
    assert (line["request_id"], line["termination"]) == (f"id-{len(paths[0])}", "----")
    assert {"total_ms", "queue_ms", "connect_ms", "response_ms", "bytes_in", "bytes_out", "retries"} <= line.keys()
    assert 'haproxy_server_http_responses_total{proxy="svc_echo",server="echo-1",code="2xx"} 2' in await edge.metrics()
    async with ClientSession() as client, client.get(f"http://{edge.container.ip}:8404/") as answer:
        assert (answer.status, answer.content_type) == (200, "text/html")


async def test_haproxy_logs_failures_slow_requests_the_sample_and_where_all_are_logged_all_of_foreign_images(
    edge: Edge,
) -> None:
    """The sample is that of the replicas: the ids whose zlib.crc32 is below its share. Each request has one line."""
    log, every = AccessLog(slow_request_s=60), AccessLog("all")
    await edge.route(
        service("echo", access_log=log),
        service("slow", access_log=AccessLog(slow_request_s=1.2)),
        service("echo-all", access_log=every),
        service("foreign", managed=False, access_log=log),
        service("foreign-all", managed=False, access_log=every),
        service("off", access_log=AccessLog("off")),
        service(
            "full", max_ongoing_requests=1, max_queued_requests=0, backpressure=BackpressureAnswer(429), access_log=log
        ),
    )
    for name in edge.specs:
        await edge.serve(name, f"{name}-1")
    # First: on a connection to the replica that has served other requests, HAProxy closes the client's connection
    # without an answer, and without a line.
    for path in ("/echo/die", "/echo-all/die", "/off/die"):
        assert (await error_of(edge, path))[0] == 502
    ids = [f"id-{number}" for number in range(1000)]
    for request_id in ids:
        async with edge.http.get("/echo/plain", headers={"x-request-id": request_id}) as answer:
            assert answer.status == 200
    async with edge.busy("full", edge.replicas[-1]), edge.http.get("/full/refused"):
        pass
    async with edge.http.post("/echo-all/sample", headers={"x-request-id": ids[69]}):
        pass
    for path in ("/slow/slow", "/echo/missing", "/echo-all/x", "/foreign/missing", "/foreign/x", "/foreign-all/x"):
        async with edge.http.post(path, headers={"x-request-id": "other"}):
            pass
    async with edge.http.get("/end"):
        pass

    async def done() -> bool:
        return any(line["path"] == "/end" for line in await asyncio.to_thread(edge.container.log_lines))

    await until(done, "the last request is logged")
    lines = edge.container.log_lines()
    plain = {str(line["request_id"]) for line in lines if line["path"] == "/echo/plain"}
    assert plain == {each for each in ids if zlib.crc32(each.encode()) < 2**32 // 100}
    assert logged_as([line for line in lines if line["path"] != "/echo/plain"]) == [
        ("/echo-all/die", "echo-all", "echo-all-1", 502),
        ("/echo-all/sample", "echo-all", "echo-all-1", 200),
        ("/echo/die", "echo", "echo-1", 502),
        ("/end", "", "<NOSRV>", 404),
        ("/foreign-all/x", "foreign-all", "foreign-all-1", 200),
        ("/foreign/missing", "foreign", "foreign-1", 404),
        ("/full/refused", "full", "<NOSRV>", 429),
        ("/slow/slow", "slow", "slow-1", 200),
    ]


# ---------------------------------------------------------------------------------------------------------------- gRPC


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


async def test_grpc_calls_go_through_with_trailers_and_streams(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(shows_routes=True))
    async with grpc_edge(edge) as (_, channel):
        call = channel.unary_unary("/test.Echo/Unary")(b"x" * 300_000, metadata=(("x-request-id", "mine"),))
        assert await call == b"x" * 300_000
        assert dict(await call.trailing_metadata())["replica"] == "one"
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        stream = channel.unary_stream("/test.Echo/Count")(b"")
        assert [message async for message in stream] == [b"0", b"1", b"2", b"3", b"4"]
        unknown = await refusal(channel.unary_unary("/test.EchoX/Unary")(b""))
        assert unknown.code() is grpc.StatusCode.UNIMPLEMENTED
        assert unknown.details() == "No such gRPC service here. Known are test.Echo, test.Other."


@pytest.mark.parametrize(
    ("limits", "code", "words", "refused"),
    [
        (
            {"request_timeout_s": 0.4},
            grpc.StatusCode.UNAVAILABLE,
            "No replica of echo took the call: all are busy or cannot be reached. Nothing was done. Try again.",
            None,
        ),
        (
            {"max_queued_requests": 0},
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Every replica of echo is busy and 0 calls wait already. Try again later.",
            "overloaded",
        ),
    ],
    ids=["waited too long", "the queue is full"],
)
async def test_grpc_calls_that_find_every_replica_busy(
    edge: Edge, limits: dict[str, Any], code: grpc.StatusCode, words: str, refused: str | None
) -> None:
    async with grpc_edge(edge, max_ongoing_requests=1, **limits) as (replica, channel):
        held = asyncio.ensure_future(channel.unary_unary("/test.Echo/Hold")(b"").code())
        await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
        error = await refusal(channel.unary_unary("/test.Echo/Unary")(b""))
        assert (error.code(), error.details()) == (code, words)
        assert metadata_of(error).get("pierhead-refused") == refused
        replica.let_go.set()
        assert await held is grpc.StatusCode.OK


async def test_what_grpc_clients_say_of_themselves_is_removed(edge: Edge) -> None:
    async with grpc_edge(edge) as (_, channel):
        said = (("x-forwarded-for", "192.0.2.1"), ("x-forwarded-user", "root"), ("forwarded", "for=192.0.2.1"))
        call = channel.unary_unary("/test.Echo/Unary")(b"x", metadata=said)
        assert await call == b"x"
        assert dict(await call.trailing_metadata())["received"] == f"x-forwarded-for={edge.container.gateway}"


async def test_a_grpc_replica_that_dies_is_unavailable(edge: Edge) -> None:
    async with grpc_edge(edge) as (replica, channel):
        held = asyncio.ensure_future(refusal(channel.unary_unary("/test.Echo/Hold")(b"")))
        await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
        await replica.server.stop(0)
        assert (await held).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_grpc_service_of_two_services_is_chosen_by_the_application(edge: Edge) -> None:
    replicas = {name: GrpcReplica(edge.container.gateway, name) for name in ("eu", "us")}
    names = [*replicas, *(f"more{number:02}" for number in range(60))]
    probe = await edge.replica("probe")
    specs = [
        service(
            name,
            protocol="grpc",
            route=None,
            grpc_services=("test.Echo",),
            application=f"shop-{name}",
            replica_header=True,
        )
        for name in names
    ]
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(shows_routes=True))
    await edge.route(*(with_probe_port(spec, probe.port) for spec in specs))
    for name, replica in replicas.items():
        await replica.server.start()
        await edge.add(name, f"{name}-1", replica.address, probe.port)
    async with grpc.aio.insecure_channel(f"{edge.container.ip}:9000") as channel:
        method: Any = channel.unary_unary("/test.Echo/Unary")
        for name in ("eu", "us", "eu"):
            call = method(b"x", metadata=(("application", f"shop-{name}"),))
            assert await call == b"x"
            assert dict(await call.initial_metadata())["x-pierhead-replica"] == f"{name}-1"
            assert dict(await call.trailing_metadata())["replica"] == name
        for metadata in ((), (("application", "shop"),), (("application", "shop-eu,shop-us"),)):
            refused = await refusal(method(b"x", metadata=metadata))
            assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.details() == (
                f"test.Echo is served by the applications {', '.join(f'shop-{name}' for name in sorted(names))}: set "
                "the metadata key application to one of them. Nothing was done."
            )
    for replica in replicas.values():
        await replica.server.stop(0)


# ------------------------------------------------------------------------------------------------ to a named replica


async def test_a_request_goes_to_the_replica_that_it_names_while_that_takes_requests(edge: Edge) -> None:
    await edge.route(service("jobs", replica_header=True), service("other"))
    replicas = {name: await edge.serve("jobs", name) for name in ("jobs-1", "jobs-2", "jobs-3")}
    await edge.serve("other", "other-1")

    async def asked(name: str | None, path: str = "/jobs") -> tuple[str, str | None]:
        """The replica that answered, and the one that the response names."""
        async with edge.http.get(path, headers={"x-pierhead-replica": name} if name else {}) as answer:
            assert answer.status == 200
            return (await answer.json())["replica"], answer.headers.get("x-pierhead-replica")

    for name in 5 * [*replicas]:
        assert await asked(name) == (name, name)
    for other in (None, "hold", "jobs-9", "other-1", "-", "x" * 500, "jobs-1,jobs-9", "svc_jobs/jobs-1"):
        one, named = await asked(other)
        assert one == named, "it says which one it was"
        assert one in replicas
    assert await asked("other-1", "/other") == ("other-1", None), "a service that does not allow it names none"
    await edge.drain("jobs", "jobs-2")
    assert "jobs-2" not in {(await asked("jobs-2"))[0] for _ in range(5)}, "a drain outranks the name"
    await replicas["jobs-3"].stop()
    assert {(await asked("jobs-3"))[0] for _ in range(5)} == {"jobs-1"}, "whether HAProxy has noticed yet or not"


async def test_a_request_waits_for_the_replica_that_it_names(edge: Edge) -> None:
    await edge.route(service("jobs", replica_header=True, max_ongoing_requests=1))
    busy, free = [await edge.serve("jobs", name) for name in ("jobs-1", "jobs-2")]
    held = asyncio.ensure_future(edge.http.post("/jobs/hold", headers={"x-pierhead-replica": "jobs-1"}))
    await asyncio.wait_for(busy.begun.wait(), PATIENCE_S)
    waiting = asyncio.ensure_future(edge.http.get("/jobs", headers={"x-pierhead-replica": "jobs-1"}))
    await until(lambda: edge.queued("jobs"), "it is in the queue")
    busy.let_go.set()
    assert [(await one).status for one in (held, waiting)] == [200, 200]
    assert (busy.requests, free.requests) == (2, 0)


# ---------------------------------------------------------------------------------------------------------- under load


async def test_no_request_fails_while_servers_come_and_go_and_routes_change(edge: Edge) -> None:
    await edge.route(service("echo", max_ongoing_requests=50))
    replicas = [await edge.serve("echo", f"echo-{n}") for n in range(3)]
    await edge.drain("echo", "echo-2")
    async with (
        ClientSession(edge.url, connector=TCPConnector(limit=0)) as session,
        Load(20, partial(posted, session)).running() as load,
    ):
        await load.more(100)
        served = replicas[2].requests
        for number in range(5):
            await edge.route(*edge.specs.values(), service(f"other-{number}"))
            await load.more(200)
            replicas.append(await edge.serve("echo", f"echo-{number + 3}"))
            leaving = 0 if number == 0 else number + 2
            await edge.remove("echo", f"echo-{leaving}")
            await replicas[leaving].stop()
            await load.more(100)
    assert load.outcomes.keys() == {200}
    assert replicas[2].requests == served, "the drained one got no request"


async def test_no_grpc_call_fails_while_servers_come_and_go_and_routes_change(edge: Edge) -> None:
    async with grpc_edge(edge) as (first, channel):
        probe, grown, echo = edge.replicas[0], [first], edge.specs["echo"]

        async def ask() -> object:
            return await channel.unary_unary("/test.Echo/Unary")(b"x").code()

        async with Load(10, ask).running() as load:
            for number in range(2, 6):
                grown.append(GrpcReplica(edge.container.gateway))
                await grown[-1].server.start()
                await edge.add("echo", f"echo-{number}", grown[-1].address, probe.port)
                await load.more(100)
                await edge.remove("echo", f"echo-{number - 1}")
                await grown[-2].server.stop(0)
                await load.more(100)
                await edge.route(echo, service(f"other-{number}"))
                await load.more(200)
        await grown[-1].server.stop(0)
    assert load.outcomes.keys() == {grpc.StatusCode.OK}


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


async def test_a_session_stays_where_it_is_and_only_those_of_a_server_that_comes_or_goes_move(edge: Edge) -> None:
    await edge.route(service("echo", router_policy="consistent_hash"))
    for name in ("echo-0", "echo-1", "echo-2"):
        await edge.serve("echo", name)
        await until(partial(edge.is_up, name), f"{name} is up")
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
