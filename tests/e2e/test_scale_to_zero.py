"""Services that sleep until a request comes: it is held at the edge, wakes one replica, and succeeds."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, TCPConnector, WSMsgType
from docker.models.containers import Container
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc

from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import Stack, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

ASLEEP = (Path(__file__).parent / "apps" / "asleep.yaml").read_text()
ECHO = "/echo?message=hi"
ANSWER = {"response": "Echo: hi"}
SLEEPS_AFTER_S = 3.0
"""downscale_delay_s of tests/e2e/apps/asleep.yaml."""
HELD_S = 60.0
"""How long a request is held at most: request_timeout_s there."""
SOON_S = 120.0


@pytest.fixture
def asleep(written: WrittenStack) -> WrittenStack:
    """The echo, with nothing at work."""
    written.become(ASLEEP, echo=0, **{"echo-child": 0})
    eventually(lambda: written.get("/-/routes").json == {"/echo": "echo"}, "the routes are there")
    return written


def wait_asleep(stack: Stack) -> None:
    stack.wait_settled(within_s=SOON_S, **{"echo": 0, "echo-child": 0})


def decisions(stack: Stack, service: str) -> list[str]:
    """What the autoscaler decided for a service, in words."""
    return [event["message"] for event in stack.events() if (event["kind"], event["service"]) == ("autoscale", service)]


def steps(stack: Stack, service: str) -> list[str]:
    """From each decision, "0 -> 1"."""
    return [re.search(r"\d+ -> \d+", words).group() for words in decisions(stack, service)]  # type: ignore[union-attr]


async def ask(stack: Stack, requests: int) -> list[tuple[int, Any]]:
    async with ClientSession(connector=TCPConnector(limit=0)) as session:

        async def one() -> tuple[int, Any]:
            async with session.get(stack.url(ECHO)) as answer:
                return answer.status, await answer.json()

        return await asyncio.gather(*(one() for _ in range(requests)))


def test_the_first_request_after_idle_succeeds(asleep: WrittenStack) -> None:
    worker = asleep.haproxy_worker()
    answer = asleep.get(ECHO)
    assert (answer.status, answer.json) == (200, ANSWER)
    wait_asleep(asleep)
    assert steps(asleep, "echo") == steps(asleep, "echo-child") == ["0 -> 1", "1 -> 0"]
    assert decisions(asleep, "echo")[0] == (
        "echo: 0 -> 1 replicas: woken by 1 held request: 1.0 requests (0.0 in work, 1.0 waiting), no replica running"
    )
    assert asleep.haproxy_worker() == worker, "neither its sleep nor its wake reloads HAProxy"


def created(stack: Stack, service: str) -> int:
    """How many containers were made for a service."""
    return sum((event["kind"], event["service"]) == ("create_container", service) for event in stack.events())


@pytest.mark.long
def test_a_hundred_grpc_calls_at_once_wake_one_replica_and_all_succeed(asleep: WrittenStack) -> None:
    async def call() -> list[str]:
        async with grpc.aio.insecure_channel(asleep.grpc_address) as channel:
            stub: Any = echo_pb2_grpc.EchoStub(channel)
            calls = (stub.Echo(echo_pb2.EchoRequest(message="hi"), timeout=SOON_S) for _ in range(100))
            return [reply.response for reply in await asyncio.gather(*calls)]

    assert asyncio.run(call()) == ["Echo: hi"] * 100
    wait_asleep(asleep)
    assert (steps(asleep, "echo"), steps(asleep, "echo-child")) == ([], ["0 -> 1", "1 -> 0"])
    assert created(asleep, "echo-child") == 1


def test_a_hundred_at_once_go_through_two_services_that_sleep(asleep: WrittenStack) -> None:
    """The second one is woken by the calls that wait in the first."""
    assert asyncio.run(ask(asleep, 100)) == [(200, ANSWER)] * 100
    assert steps(asleep, "echo")[0] == steps(asleep, "echo-child")[0] == "0 -> 1"
    assert created(asleep, "echo-child") == 1


@pytest.mark.long
def test_status_and_metrics_tell_of_held_requests_and_a_client_that_leaves_wakes_nothing_again(
    asleep: WrittenStack,
) -> None:
    async def look_while_held() -> str:
        async with ClientSession() as session:
            asking = asyncio.ensure_future(session.get(asleep.url(ECHO)))
            message = await asyncio.to_thread(
                eventually, lambda: held_message(asleep), "the status tells of the held request", every_s=0.01
            )
            asking.cancel()
            return message

    assert "woken by 1 held request" in asyncio.run(look_while_held())
    page = request(f"http://127.0.0.1:{asleep.ports['PIERHEAD_API_PORT']}/metrics").body.decode()
    assert 'pierhead_edge_held_requests{service="echo"}' in page
    wait_asleep(asleep)
    assert steps(asleep, "echo") == ["0 -> 1", "1 -> 0"]


def held_message(stack: Stack) -> str:
    message: str = stack.service("echo")["message"]
    return message if "held" in message else ""


@pytest.mark.long
def test_nothing_waits_for_what_scale_has_set_to_zero_and_all_do_again_afterwards(asleep: WrittenStack) -> None:
    def is_refused() -> bool:
        answer = asleep.get(ECHO)
        return answer.status == 503 and answer.json["error"]["code"] == "scaled_to_zero"

    worker = asleep.haproxy_worker()
    asleep.scale("echo", 0)
    begun = time.monotonic()
    answer = asleep.get(ECHO)
    assert time.monotonic() - begun < HELD_S / 2, "it is not held"
    assert answer.json["error"]["code"] == "scaled_to_zero"
    assert "pierhead scale echo 1" in answer.json["error"]["message"]
    assert answer.headers["retry-after"] == "10"
    assert asleep.haproxy_worker() == worker
    asleep.kill_process(asleep.container("haproxy"))  # the next process gets the message, too
    eventually(lambda: asleep.haproxy_worker() != worker and is_refused(), "HAProxy is back", SOON_S)
    assert asleep.pierhead("scale", "echo", "auto").returncode == 0
    eventually(lambda: asleep.get(ECHO).status == 200, "it wakes again", SOON_S)


@pytest.mark.long
def test_a_replica_with_an_open_stream_does_not_go_to_sleep(asleep: WrittenStack) -> None:
    async def converse() -> None:
        async with ClientSession() as session, session.ws_connect(asleep.url("/echo/socket")) as socket:
            for _ in range(2):
                # Nothing is said for a while: what keeps it awake is the stream, not the messages.
                with pytest.raises(TimeoutError):
                    await socket.receive(timeout=1.5 * SLEEPS_AFTER_S)
                await socket.send_str("hi")
                message = await socket.receive(timeout=SOON_S)
                assert (message.type, message.data) == (WSMsgType.TEXT, "Echo: hi")
            assert steps(asleep, "echo") == ["0 -> 1"]

    asyncio.run(converse())
    wait_asleep(asleep)
    assert steps(asleep, "echo") == ["0 -> 1", "1 -> 0"]


def test_requests_outlive_the_crash_of_the_only_replica(asleep: WrittenStack) -> None:
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
