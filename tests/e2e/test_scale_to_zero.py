"""Services that sleep until somebody asks: the request is held at the edge, wakes one replica, and succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, TCPConnector, WSMsgType
from docker.models.containers import Container
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc

from tests.harness.machine import Pace, judge
from tests.harness.stack import Stack, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

ECHO = "/echo?message=hi"
ANSWER = {"response": "Echo: hi"}
SLEEPS_AFTER_S = 3.0
"""downscale_delay_s of tests/e2e/apps/asleep.yaml."""
SOON_S = 120.0


@pytest.fixture(scope="module")
def running_asleep() -> Iterator[Stack]:
    with Stack("pierhead-test-asleep", ["tests/e2e/apps/asleep.yaml"]).running() as stack:
        eventually(lambda: stack.get("/-/routes").json == {"/echo": "echo"}, "the routes are there")
        yield stack


@pytest.fixture
def asleep(running_asleep: Stack) -> Stack:
    """The stack with nobody at work."""
    wait_asleep(running_asleep)
    return running_asleep


def wait_asleep(stack: Stack) -> None:
    stack.wait_settled(within_s=SOON_S, **{"echo": 0, "echo-child": 0})


def decisions(stack: Stack, since: int) -> dict[str, list[str]]:
    """What the autoscaler decided for each service after that event."""
    found: dict[str, list[str]] = {"echo": [], "echo-child": []}
    for event in stack.events():
        if event["kind"] == "autoscale" and event["seq"] > since:
            found[event["service"]].append(event["message"])
    return found


def steps(messages: list[str]) -> list[str]:
    """From each decision, "0 -> 1"."""
    return [re.search(r"\d+ -> \d+", message).group() for message in messages]  # type: ignore[union-attr]


def last_event(stack: Stack) -> int:
    return max(int(event["seq"]) for event in stack.events())


async def ask(stack: Stack, requests: int) -> list[tuple[int, Any]]:
    async with ClientSession(connector=TCPConnector(limit=0)) as session:

        async def one() -> tuple[int, Any]:
            async with session.get(stack.url(ECHO)) as answer:
                return answer.status, await answer.json()

        return await asyncio.gather(*(one() for _ in range(requests)))


def test_the_first_request_after_idle_succeeds(asleep: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    worker, since = asleep.haproxy_worker(), last_event(asleep)
    started = time.monotonic()
    answer = asleep.get(ECHO)
    took_s = time.monotonic() - started
    assert (answer.status, answer.json) == (200, ANSWER)
    wait_asleep(asleep)
    told = decisions(asleep, since)
    assert steps(told["echo"]) == steps(told["echo-child"]) == ["0 -> 1", "1 -> 0"]
    assert told["echo"][0] == (
        "echo: 0 -> 1 replicas: woken by 1 held request: 1.0 requests (0.0 in work, 1.0 waiting), no replica running"
    )
    assert asleep.haproxy_worker() == worker, "neither its sleep nor its wake reloads HAProxy"
    with capsys.disabled():
        print(f"\n  answered after {took_s:.1f} s, two services woken one after the other")


@contextlib.contextmanager
def child_awake(stack: Stack) -> Iterator[None]:
    """Somebody calls the child now and then."""
    over = threading.Event()

    def call() -> None:
        with grpc.insecure_channel(stack.grpc_address) as channel:
            while not over.wait(0.2):
                echo_pb2_grpc.EchoStub(channel).Echo(echo_pb2.EchoRequest(message="hi"), timeout=SOON_S)

    calling = threading.Thread(target=call)
    calling.start()
    try:
        stack.wait_settled(within_s=SOON_S, **{"echo-child": 1})
        yield
    finally:
        over.set()
        calling.join()


def created(stack: Stack, service: str, since: int) -> list[str]:
    return [
        event["target"]
        for event in stack.events()
        if event["seq"] > since and event["kind"] == "create_container" and event["service"] == service
    ]


def test_a_hundred_at_once_wake_one_replica_and_all_succeed(asleep: Stack) -> None:
    since = last_event(asleep)
    with child_awake(asleep):
        assert asyncio.run(ask(asleep, 100)) == [(200, ANSWER)] * 100
        asleep.wait_settled(within_s=SOON_S, echo=0)
    told = decisions(asleep, since)["echo"]
    assert steps(told) == ["0 -> 1", "1 -> 0"]
    assert told[0].startswith("echo: 0 -> 1 replicas: woken by ")
    assert len(created(asleep, "echo", since)) == 1


def test_a_hundred_grpc_calls_at_once_wake_one_replica_and_all_succeed(asleep: Stack) -> None:
    async def call() -> list[str]:
        async with grpc.aio.insecure_channel(asleep.grpc_address) as channel:
            stub: Any = echo_pb2_grpc.EchoStub(channel)
            calls = (stub.Echo(echo_pb2.EchoRequest(message="hi"), timeout=SOON_S) for _ in range(100))
            return [reply.response for reply in await asyncio.gather(*calls)]

    since = last_event(asleep)
    assert asyncio.run(call()) == ["Echo: hi"] * 100
    wait_asleep(asleep)
    told = decisions(asleep, since)
    assert (steps(told["echo"]), steps(told["echo-child"])) == ([], ["0 -> 1", "1 -> 0"])
    assert len(created(asleep, "echo-child", since)) == 1


def test_a_hundred_at_once_go_through_two_services_that_sleep(asleep: Stack) -> None:
    """The second one is woken by the calls that wait in the first."""
    since = last_event(asleep)
    assert asyncio.run(ask(asleep, 100)) == [(200, ANSWER)] * 100
    told = decisions(asleep, since)
    assert steps(told["echo"])[0] == steps(told["echo-child"])[0] == "0 -> 1"
    assert len(created(asleep, "echo-child", since)) == 1


def test_status_and_metrics_tell_of_held_requests_and_a_client_that_leaves_wakes_nobody_again(asleep: Stack) -> None:
    async def look_while_held() -> str:
        async with ClientSession() as session:
            asking = asyncio.ensure_future(session.get(asleep.url(ECHO)))
            message = await asyncio.to_thread(
                eventually, lambda: held_message(asleep), "the status tells of the held request", every_s=0.01
            )
            asking.cancel()
            return message

    since = last_event(asleep)
    assert "woken by 1 held request" in asyncio.run(look_while_held())
    page = request(f"http://127.0.0.1:{asleep.ports['PIERHEAD_API_PORT']}/metrics").body.decode()
    assert 'pierhead_edge_held_requests{service="echo"}' in page
    wait_asleep(asleep)
    assert steps(decisions(asleep, since)["echo"]) == ["0 -> 1", "1 -> 0"]


def held_message(stack: Stack) -> str:
    message: str = stack.service("echo")["message"]
    return message if "held" in message else ""


def test_nobody_waits_for_what_scale_has_set_to_zero_and_all_do_again_afterwards(asleep: Stack) -> None:
    def is_refused() -> bool:
        answer = asleep.get(ECHO)
        return answer.status == 503 and answer.json["error"]["code"] == "scaled_to_zero"

    worker = asleep.haproxy_worker()
    asleep.scale("echo", 0)
    assert is_refused()
    with Pace() as pace:
        begun = time.monotonic()
        answer = asleep.get(ECHO)
        told_s = time.monotonic() - begun
    assert "make scale SERVICE=echo N=1" in answer.json["error"]["message"]
    assert answer.headers["retry-after"] == "10"
    assert asleep.haproxy_worker() == worker
    asleep.kill_process(asleep.container("haproxy"))  # the one that follows is told, too
    eventually(lambda: asleep.haproxy_worker() != worker and is_refused(), "HAProxy is back", SOON_S)
    assert asleep.pierhead("scale", "echo", "auto").returncode == 0
    eventually(lambda: asleep.get(ECHO).status == 200, "it wakes again", SOON_S)
    judge(told_s < 1.0, f"it is told at once, and it was {told_s:.1f} s", pace)


def test_a_replica_with_an_open_stream_does_not_go_to_sleep(asleep: Stack) -> None:
    since = last_event(asleep)

    async def converse() -> None:
        async with ClientSession() as session, session.ws_connect(asleep.url("/echo/socket")) as socket:
            begun = time.monotonic()
            said = 0
            while time.monotonic() - begun < 3 * SLEEPS_AFTER_S:
                # Nothing is said for a while: what keeps it awake is the stream, not the messages.
                with pytest.raises(TimeoutError):
                    await socket.receive(timeout=SLEEPS_AFTER_S)
                await socket.send_str("hi")
                message = await socket.receive(timeout=SOON_S)
                assert (message.type, message.data) == (WSMsgType.TEXT, "Echo: hi")
                said += 1
            assert said >= 2
            assert steps(decisions(asleep, since)["echo"]) == ["0 -> 1"]

    asyncio.run(converse())
    wait_asleep(asleep)
    assert steps(decisions(asleep, since)["echo"]) == ["0 -> 1", "1 -> 0"]


def test_requests_outlive_the_crash_of_the_only_replica(asleep: Stack) -> None:
    async def crash() -> Container:
        """Kill the replica that holds a stream: without one it would soon sleep, perhaps before it is killed."""
        async with ClientSession() as session, session.ws_connect(asleep.url("/echo/socket")) as socket:
            (replica,) = asleep.replicas("echo").values()
            asleep.kill_process(replica)
            assert (await socket.receive(timeout=SOON_S)).type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)
        return replica

    before = asyncio.run(crash())
    eventually(lambda: asleep.service("echo")["ready"] == 0, "the crash is seen")
    assert asleep.get(ECHO).status == 200
    assert before.id not in asleep.replica_ids("echo")
