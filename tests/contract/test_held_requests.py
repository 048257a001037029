"""Requests that find no server at the real HAProxy: held until one takes traffic, bounded, counted, and let go."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, ServerDisconnectedError, TCPConnector, WSMsgType

from controller.model.actions import DeleteServer, SetServerState, SetWaitingRoom
from controller.model.spec import AccessLog, AutoscaleSpec, ServiceSpec, backend_name
from controller.model.world import HeldRequests, ServerState
from controller.routing import haproxy_config
from controller.routing.haproxy import HAProxyRouter
from controller.routing.haproxy_config import TEMPLATE
from controller.settings import EdgeLimits
from tests.harness.edge import (
    Edge,
    GrpcReplica,
    Replica,
    error_of,
    metadata_of,
    refusal,
    service,
    with_probe_port,
)
from tests.harness.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

TO_ZERO = AutoscaleSpec(min=0, max=4)


def sleeping(name: str = "echo", **changes: Any) -> ServiceSpec:
    return service(name, autoscale=TO_ZERO, access_log=AccessLog(sample=1), **changes)


async def held(edge: Edge, name: str = "echo") -> HeldRequests:
    return (await edge.state()).held.get(backend_name(name), HeldRequests())


async def until_held(edge: Edge, count: int, name: str = "echo") -> None:
    async def so_many() -> bool:
        return (await held(edge, name)).now == count

    await until(so_many, f"{count} requests of {name} are held")


@contextlib.asynccontextmanager
async def client(edge: Edge) -> AsyncIterator[ClientSession]:
    """As many connections as there are requests; each closed after its answer, as a reload's old worker wants it."""
    async with ClientSession(edge.url, connector=TCPConnector(limit=0, force_close=True)) as session:
        yield session


async def outcome(session: ClientSession, path: str = "/echo", **arguments: Any) -> tuple[int, float, str]:
    """Status, time of the answer, body. A POST: this client would repeat a GET by itself."""
    async with session.post(path, **arguments) as answer:
        return answer.status, time.monotonic(), await answer.text()


async def test_a_hundred_at_once_wait_for_the_first_server_and_all_succeed(edge: Edge) -> None:
    await edge.route(sleeping(max_ongoing_requests=1000))
    replica = await edge.replica("echo-1")
    before = (await edge.state()).pid
    async with client(edge) as session:
        requests = [asyncio.ensure_future(outcome(session, data=b"x" * 3000)) for _ in range(100)]
        await until_held(edge, 100)
        await edge.add("echo", "echo-1", replica.address)
        answers = await asyncio.gather(*requests)
        assert {status for status, _, _ in answers} == {200}
        assert replica.requests == 100
        for _ in range(20):
            assert (await outcome(session))[0] == 200
    assert await held(edge) == HeldRequests(served=100), "the later requests did not enter the waiting room"
    assert (await edge.state()).pid == before


async def test_what_was_held_reaches_the_replica_as_it_was_sent(edge: Edge) -> None:
    await edge.route(sleeping(strip_prefix=True))
    async with client(edge) as session:
        headers = {"x-request-id": "mine", "x-custom": "1"}
        request = asyncio.ensure_future(session.get("/echo/a/b?c=d", headers=headers))
        await until_held(edge, 1)
        was_held = time.time()
        await edge.serve("echo", "echo-1")
        async with await request as answer:
            assert answer.headers["x-request-id"] == "mine"
            seen = await answer.json()
    assert seen["path"] == "/a/b"
    got = seen["headers"]
    assert int(got["x-request-start"].removeprefix("t=")) / 1e6 <= was_held, "when it came, not when it was let go"
    assert (got["x-request-id"], got["x-custom"]) == ("mine", "1")
    assert (got["x-forwarded-for"], got["x-forwarded-proto"]) == (edge.container.gateway, "http")
    assert got["x-forwarded-host"] == got["host"] == f"{edge.container.ip}:8000"


async def test_a_client_that_leaves_frees_its_place(edge: Edge) -> None:
    await edge.route(sleeping())
    async with client(edge) as session:
        requests = [asyncio.ensure_future(outcome(session)) for _ in range(10)]
        await until_held(edge, 10)
        for request in requests[:7]:
            request.cancel()
        await until_held(edge, 3)
        assert (await held(edge)).left == 7
        replica = await edge.serve("echo", "echo-1")
        assert [status for status, _, _ in await asyncio.gather(*requests[7:])] == [200] * 3
    assert replica.requests == 3, "who left is no work for anybody"


async def test_large_bodies_and_heads_are_held_like_small_ones(edge: Edge) -> None:
    """The buffer of such a request is full: that must not be taken for a client that went away."""
    await edge.route(sleeping())
    async with client(edge) as session:
        requests = [asyncio.ensure_future(outcome(session, data=b"x" * 900_000)) for _ in range(3)]
        headers = {f"x-long-{number}": "x" * 3000 for number in range(4)}
        requests.append(asyncio.ensure_future(outcome(session, headers=headers)))
        await until_held(edge, 4)
        replica = await edge.serve("echo", "echo-1")
        assert [status for status, _, _ in await asyncio.gather(*requests)] == [200] * 4
    assert replica.requests == 4
    assert await held(edge) == HeldRequests(served=4)


async def dies(edge: Edge, replica: Replica, death: str) -> None:
    """Stop the replica, and wait until HAProxy is in the state that its test is about."""
    await replica.stop()
    match death:
        case "seen by the check":

            async def down() -> bool:
                return not await edge.is_up(replica.name)

            await until(down, "HAProxy's check has noticed")
        case "in maintenance":
            action = SetServerState(target=replica.name, backend="svc_echo", state=ServerState.MAINT)
            await edge.router.perform(action)
        case "deleted":
            await edge.router.perform(DeleteServer(target=replica.name, backend="svc_echo"))
        case "not seen by the check":
            assert await edge.is_up(replica.name)


def let_checks_notice_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy checks a server that is added from now on once, and then not again in any test's time."""
    monkeypatch.setattr(haproxy_config, "CHECK_INTERVAL_CAP_S", 10 * PATIENCE_S)
    monkeypatch.setattr(haproxy_config, "CHECK_AGAIN_S", 10 * PATIENCE_S)


DEATHS = ("seen by the check", "in maintenance", "deleted", "not seen by the check")


@pytest.mark.parametrize("death", DEATHS)
async def test_a_request_after_the_only_replica_died_is_held(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    monkeypatch.setattr(haproxy_config, "HEAL_HOLD_S", PATIENCE_S)
    if death == "not seen by the check":
        let_checks_notice_nothing(monkeypatch)
    await edge.route(service("echo", strip_prefix=True))
    replica = await edge.serve("echo", "echo-1")
    async with client(edge) as session:
        assert (await outcome(session))[0] == 200
        await dies(edge, replica, death)
        requests = [asyncio.ensure_future(session.post("/echo/a?b=c", data=b"x" * 3000)) for _ in range(10)]
        await until_held(edge, 10)
        await edge.serve("echo", "echo-2")
        for request in requests:
            async with await request as answer:
                seen = await answer.json()
                assert (answer.status, seen["replica"], seen["path"]) == (200, "echo-2", "/a")
                assert seen["headers"]["x-forwarded-for"] == edge.container.gateway
                assert seen["headers"]["x-forwarded-prefix"] == "/echo"


async def test_a_request_that_a_dead_replica_sends_back_is_not_held_longer_and_is_logged_once(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy_config, "HEAL_HOLD_S", 0.5)
    let_checks_notice_nothing(monkeypatch)
    await edge.route(service("echo"), sleeping("other"))
    await dies(edge, await edge.serve("echo", "echo-1"), "not seen by the check")
    await dies(edge, await edge.serve("other", "other-1"), "not seen by the check")
    status, error, headers = await error_of(edge, "/echo", method="POST")
    assert (status, error["code"], headers["retry-after"]) == (503, "no_replica", "1")
    async with client(edge) as session:
        request = asyncio.ensure_future(outcome(session, "/other/held"))
        await until_held(edge, 1, "other")
        await edge.serve("other", "other-2")
        assert (await request)[0] == 200
        assert (await outcome(session, "/other/later"))[0] == 200
    lines = [(line["path"], line["replica"], line["status"]) for line in await edge.logged(3)]
    assert lines[0][::2] == ("/echo", 503)
    assert sorted(lines[1:]) == [("/other/held", "other-2", 200), ("/other/later", "other-2", 200)]


async def test_a_held_request_is_logged_once_whatever_its_end(edge: Edge) -> None:
    await edge.route(sleeping(), sleeping("other"))
    await set_waiting_room(edge, "other", is_open=False)
    async with client(edge) as session:
        assert (await outcome(session, "/other/refused"))[0] == 503
        left = asyncio.ensure_future(outcome(session, "/echo/left"))
        request = asyncio.ensure_future(outcome(session, "/echo/held"))
        await until_held(edge, 2)
        left.cancel()
        await until_held(edge, 1)
        await edge.serve("echo", "echo-1")
        assert (await request)[0] == 200
    lines = {line["path"]: line for line in await edge.logged(3)}
    assert [(path, line["service"], line["status"]) for path, line in sorted(lines.items())] == [
        ("/echo/held", "echo", 200),
        ("/echo/left", "echo", 499),
        ("/other/refused", "other", 503),
    ]
    waited = lines["/echo/held"]
    assert (waited["replica"], waited["frontend"], waited["client"]) == ("echo-1", "held", edge.container.gateway)
    assert waited["total_ms"] >= waited["request_ms"] > 0


async def test_requests_in_the_queue_of_a_replica_that_dies_are_held(edge: Edge) -> None:
    await edge.route(sleeping(max_ongoing_requests=1))
    replica = await edge.serve("echo", "echo-1")
    async with client(edge) as session:
        at_work = asyncio.ensure_future(outcome(session, "/echo/hold"))
        await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
        waits = [asyncio.ensure_future(outcome(session)) for _ in range(5)]

        async def five_wait() -> bool:
            return await edge.queued("echo") == 5

        await until(five_wait, "five requests wait for the replica")
        await replica.stop()
        with contextlib.suppress(ServerDisconnectedError):
            assert (await at_work)[0] == 502
        await edge.serve("echo", "echo-2")
        assert [status for status, _, _ in await asyncio.gather(*waits)] == [200] * 5


async def set_waiting_room(edge: Edge, name: str = "echo", *, is_open: bool) -> None:
    await edge.router.perform(SetWaitingRoom(target=name, backend=backend_name(name), is_open=is_open))


async def test_nobody_waits_where_the_room_is_closed_and_all_do_again_when_it_is_opened(edge: Edge) -> None:
    await edge.route(sleeping())
    before = (await edge.state()).pid
    async with client(edge) as session:
        waits = asyncio.ensure_future(outcome(session))
        await until_held(edge, 1)
        await set_waiting_room(edge, is_open=False)
        status, _, body = await waits
        assert (status, "scaled_to_zero" in body) == (503, True), "who waited goes, too"
        status, error, headers = await error_of(edge, "/echo")
        assert (status, error["code"]) == (503, "scaled_to_zero")
        assert error["message"] == (
            "echo is scaled to 0 replicas, and no request wakes it: `pierhead scale echo 1` does. Nothing was done."
        )
        assert headers["retry-after"] == "10"
        assert await held(edge) == HeldRequests(refused=1), "the second never came in"
        await set_waiting_room(edge, is_open=True)
        request = asyncio.ensure_future(outcome(session))
        await until_held(edge, 1)
        await edge.serve("echo", "echo-1")
        assert (await request)[0] == 200
        await set_waiting_room(edge, is_open=False)
        assert (await outcome(session))[0] == 200, "a server that takes traffic stays"
    assert (await edge.state()).pid == before


async def test_no_more_are_held_than_may_wait(edge: Edge) -> None:
    await edge.route(sleeping(max_ongoing_requests=2, max_queued_requests=3))
    async with client(edge) as session:
        requests = [asyncio.ensure_future(outcome(session)) for _ in range(5)]
        await until_held(edge, 5)
        status, error, headers = await error_of(edge, "/echo")
        assert (status, error["code"], headers["retry-after"]) == (503, "queue_full", "1")
        assert error["message"] == (
            "No replica of echo is ready, and as many requests as may wait for one do already. "
            "Nothing was done; try again later."
        )
        assert await held(edge) == HeldRequests(now=5, refused=1)
        await edge.serve("echo", "echo-1")
        answers = await asyncio.gather(*requests)
    assert [status for status, _, _ in answers] == [200] * 5, "whom the waiting room took, the queue takes"


async def test_all_services_together_hold_no_more_than_there_is_room(edge: Edge) -> None:
    await edge.route(sleeping(), sleeping("other"))
    file = edge.run_dir / "haproxy.cfg"
    script, number = re.subn(r"(?m)^local MOST = 4000\b", "local MOST = 3", (TEMPLATE.parent / "hold.lua").read_text())
    assert number == 1
    (edge.run_dir / "hold.lua").write_text(script)
    file.write_text(file.read_text().replace("/usr/local/etc/haproxy/hold.lua", "/run/haproxy/hold.lua"))
    await asyncio.to_thread(edge.container.kill_and_wait)
    async with client(edge) as session:
        requests = [asyncio.ensure_future(outcome(session)) for _ in range(2)]
        await until_held(edge, 2)
        requests.append(asyncio.ensure_future(outcome(session, "/other")))
        await until_held(edge, 1, "other")
        assert (await outcome(session, "/other"))[0] == 503
        assert await held(edge, "other") == HeldRequests(now=1, refused=1)
        requests.pop(0).cancel()
        await until_held(edge, 1)
        requests.append(asyncio.ensure_future(outcome(session, "/other")))
        await edge.serve("echo", "echo-1")
        await edge.serve("other", "other-1")
        assert [status for status, _, _ in await asyncio.gather(*requests)] == [200] * 3


async def test_who_drains_takes_nothing_new_and_finishes_what_it_has(edge: Edge) -> None:
    await edge.route(sleeping())
    leaving = await edge.serve("echo", "echo-1")
    async with client(edge) as session:
        at_work = asyncio.ensure_future(outcome(session, "/echo/hold"))
        await asyncio.wait_for(leaving.begun.wait(), PATIENCE_S)
        await edge.drain("echo", "echo-1")
        request = asyncio.ensure_future(outcome(session))
        await until_held(edge, 1)
        assert await edge.sessions("echo-1") == 1
        await edge.serve("echo", "echo-2")
        assert '"echo-2"' in (await request)[2]
        leaving.let_go.set()
        assert '"echo-1"' in (await at_work)[2]


async def test_websockets_are_held_too(edge: Edge) -> None:
    await edge.route(sleeping())
    async with client(edge) as session:
        connecting = asyncio.ensure_future(session.ws_connect("/echo/socket"))
        await until_held(edge, 1)
        await edge.serve("echo", "echo-1")
        async with await connecting as socket:
            await socket.send_str("hi")
            message = await socket.receive(timeout=PATIENCE_S)
            assert (message.type, message.data) == (WSMsgType.TEXT, "hi")


# ------------------------------------------------------------------------------------------------------------- reloads


async def test_what_is_held_outlives_reloads(edge: Edge) -> None:
    await edge.route(sleeping())
    async with client(edge) as session:
        requests = [asyncio.ensure_future(outcome(session, data=b"x" * 3000)) for _ in range(20)]
        await until_held(edge, 20)
        for number in range(2):
            await edge.route(sleeping(), service(f"other-{number}"))
            await until_held(edge, 20)
        requests[0].cancel()
        await until_held(edge, 19)
        replica = await edge.serve("echo", "echo-1")
        answers = await asyncio.gather(*requests[1:])
    assert [status for status, _, _ in answers] == [200] * 19
    assert replica.requests == 19
    assert (await held(edge)).served == 19


async def test_a_hold_does_not_begin_again_with_a_reload(edge: Edge) -> None:
    hold_s = 6.0
    clock_s = 0.1  # HAProxy's core.now() is the time at which its loop woke up: a hold may end some 10 ms early
    await edge.route(sleeping(request_timeout_s=hold_s))
    async with client(edge) as session:
        started = time.monotonic()
        request = asyncio.ensure_future(outcome(session))
        await until_held(edge, 1)
        await asyncio.sleep(hold_s - 1)
        reloaded = time.monotonic()
        await edge.route(sleeping(request_timeout_s=hold_s), service("other"))
        status, at, body = await request
    assert (status, "no_replica" in body) == (503, True)
    assert at - started >= hold_s - clock_s
    # A hold that had started again would end hold_s after the reload. A busy machine may be hold_s - 1 late.
    assert at - reloaded < hold_s - clock_s


async def test_what_was_held_for_a_route_that_a_reload_removed_gets_an_error(edge: Edge) -> None:
    await edge.route(sleeping(), sleeping("other"))
    async with client(edge) as session:
        request = asyncio.ensure_future(outcome(session))
        await until_held(edge, 1)
        await edge.route(sleeping("other"))
        status, _, body = await request
    assert (status, "route_not_found" in body) == (404, True)


async def test_a_connection_from_before_a_reload_reaches_servers_added_after_it(edge: Edge) -> None:
    await edge.route(sleeping(request_timeout_s=2.0))
    async with ClientSession(edge.url) as kept_alive:
        assert (await outcome(kept_alive))[0] == 503
        await edge.route(sleeping(request_timeout_s=2.0), service("other"))
        await edge.serve("echo", "echo-1")
        with contextlib.suppress(ServerDisconnectedError):  # the former worker may have closed it
            assert (await outcome(kept_alive))[0] == 200


# ---------------------------------------------------------------------------------------------------------------- gRPC


@contextlib.asynccontextmanager
async def sleeping_grpc(edge: Edge, **changes: Any) -> AsyncIterator[tuple[ServiceSpec, GrpcReplica, str, Any]]:
    """Its spec, a replica that no server stands for yet, the probe's port, and a client's channel to HAProxy."""
    replica = GrpcReplica(edge.container.gateway)
    await replica.server.start()
    probe = await edge.replica("probe")
    spec = sleeping(protocol="grpc", route=None, grpc_services=("test.Echo",), **changes)
    spec = with_probe_port(spec, probe.port)
    await edge.route(spec)
    try:
        async with grpc.aio.insecure_channel(f"{edge.container.ip}:9000") as channel:
            yield spec, replica, probe.address, channel
    finally:
        replica.let_go.set()
        await replica.server.stop(0)


async def add_grpc(edge: Edge, replica: GrpcReplica, probe: str) -> None:
    await edge.add("echo", "echo-1", replica.address, int(probe.rpartition(":")[2]))


async def test_a_hundred_grpc_calls_wait_for_the_first_server(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(concurrent_streams=200))  # of this one connection
    async with sleeping_grpc(edge) as (spec, replica, probe, channel):
        unary = channel.unary_unary("/test.Echo/Unary")
        calls = [asyncio.ensure_future(_answer(unary(b"x" * 3000, timeout=20))) for _ in range(100)]
        counting = asyncio.ensure_future(_all(channel.unary_stream("/test.Echo/Count")(b"", timeout=20)))
        await until_held(edge, 101)
        await edge.route(spec, service("other"))  # they move on to the new worker
        await until_held(edge, 101)
        await add_grpc(edge, replica, probe)
        assert await asyncio.gather(*calls) == [b"x" * 3000] * 100
        assert await counting == [b"0", b"1", b"2", b"3", b"4"]
        assert (await held(edge)).served == 101


async def test_grpc_calls_after_the_only_replica_died_are_held(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    let_checks_notice_nothing(monkeypatch)
    async with sleeping_grpc(edge) as (_, replica, probe, channel):
        dead = await edge.replica("dead")
        await dead.stop()
        await edge.add("echo", "echo-0", dead.address, int(probe.rpartition(":")[2]))
        assert await edge.is_up("echo-0"), "HAProxy has noticed nothing"
        unary = channel.unary_unary("/test.Echo/Unary")
        calls = []
        # One after the other: calls that share a connection which is being opened fail with it, as UNAVAILABLE.
        for number in range(1, 6):
            calls.append(asyncio.ensure_future(_answer(unary(b"x" * 3000, timeout=PATIENCE_S))))
            await until_held(edge, number)
        await add_grpc(edge, replica, probe)
        assert await asyncio.gather(*calls) == [b"x" * 3000] * 5


async def test_a_call_larger_than_any_buffer_is_held_and_arrives_whole(edge: Edge) -> None:
    async with sleeping_grpc(edge) as (_, replica, probe, channel):
        call = asyncio.ensure_future(_answer(channel.unary_unary("/test.Echo/Unary")(b"x" * 3_000_000, timeout=20)))
        await until_held(edge, 1)
        await add_grpc(edge, replica, probe)
        assert await call == b"x" * 3_000_000


async def _answer(call: Awaitable[bytes]) -> bytes:
    return await call


async def _all(stream: Any) -> list[bytes]:
    return [message async for message in stream]


async def test_a_grpc_call_that_is_cancelled_or_out_of_time_frees_its_place(edge: Edge) -> None:
    async with sleeping_grpc(edge) as (_, replica, probe, channel):
        unary = channel.unary_unary("/test.Echo/Unary")
        cancelled, stays = unary(b"x"), unary(b"y", timeout=PATIENCE_S)
        await until_held(edge, 2)  # connected: the deadline of the third is the hold's alone
        while not (left := (await held(edge)).left):  # a busy machine: it was over before the call was held
            late = await refusal(unary(b"z", timeout=1))
            assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until_held(edge, 2)
        cancelled.cancel()
        await until_held(edge, 1)
        assert (await held(edge)).left == left + 1
        await add_grpc(edge, replica, probe)
        assert await stays == b"y"


async def test_what_grpc_calls_that_cannot_be_held_or_were_held_in_vain_get(edge: Edge) -> None:
    limits = {"request_timeout_s": PATIENCE_S, "max_ongoing_requests": 1, "max_queued_requests": 0}
    async with sleeping_grpc(edge, **limits) as (spec, _, _, channel):
        unary = channel.unary_unary("/test.Echo/Unary")
        first = unary(b"")
        await until_held(edge, 1)
        too_many = await refusal(unary(b""))
        assert too_many.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert too_many.details() == (
            "No replica of echo is ready, and as many calls as may wait for one do already. Try again later."
        )
        assert metadata_of(too_many)["pierhead-refused"] == "overloaded"
        assert await held(edge) == HeldRequests(now=1, refused=1)
        first.cancel()
        await until_held(edge, 0)
        await edge.route(replace(spec, request_timeout_s=1.0))
        in_vain = await refusal(unary(b""))
        assert in_vain.code() is grpc.StatusCode.UNAVAILABLE
        assert in_vain.details() == "No replica of echo is ready. Try again."
        assert (await held(edge)).expired == 1
        await set_waiting_room(edge, is_open=False)
        closed = await refusal(unary(b"", timeout=10))
        assert closed.code() is grpc.StatusCode.UNAVAILABLE
        assert closed.details() == (
            "echo is scaled to 0, and no call wakes it: `pierhead scale echo 1` does. Nothing was done."
        )
