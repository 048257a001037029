"""The echo's two services, real ones, calling each other on loopback ports; and its twin with generated stubs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from pierhead.calls.channel import HandleChannel
from pierhead.classes.handles import handle_on

from services.echo.app import Echo, EchoChild
from services.echo_proto import child as proto_child
from services.echo_proto import ingress as proto_ingress
from tests.bench.completion import CompletionStream
from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, know, until


async def ingress_to(cluster: Cluster, child: EchoChild) -> str:
    know(await cluster.start(child))
    handle: Any = handle_on(EchoChild, HandleChannel("echo-child"))
    ingress = await cluster.start(Echo(handle))
    return f"http://127.0.0.1:{ingress.http_port}"


@pytest.fixture
async def base_url(cluster: Cluster) -> str:
    return await ingress_to(cluster, EchoChild())


async def test_echo_with_the_greeting_that_is_set(cluster: Cluster, client: aiohttp.ClientSession) -> None:
    child = EchoChild()
    url = await ingress_to(cluster, child)

    async def answer(message: str) -> Any:
        async with client.get(f"{url}/echo", params={"message": message}) as response:
            assert response.status == 200
            return await response.json()

    for message in ("hi", "", "a b&c", "grüezi"):
        assert await answer(message) == {"response": f"Echo: {message}"}
    child.reconfigure({"greeting": "Ahoy"})
    with pytest.raises(TypeError):
        child.reconfigure({"greeting": 7})  # type: ignore[dict-item]
    assert await answer("hi") == {"response": "Ahoy: hi"}
    child.reconfigure({})
    assert await answer("hi") == {"response": "Echo: hi"}


async def test_stream_sends_fifty_chunks_and_done(base_url: str, client: aiohttp.ClientSession) -> None:
    message = 'a\nb\r\n\n"\\ grüezi \u2028 data: [DONE]\n\n'  # the event contains all of it
    async with client.get(f"{base_url}/echo/stream", params={"message": message}) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        events = (await answer.text()).removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [f"{message} {index}" for index in range(50)]
    assert {chunk["object"] for chunk in chunks} == {"text_completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 49 + ["stop"]
    expected = CompletionStream(message, 50)
    assert [json.loads(expected.chunk(index))["choices"] for index in range(50)] == [
        chunk["choices"] for chunk in chunks
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/echo", "message: missing in the query string; send /echo?message=..."),
        ("/echo/stream?message=hi&num_tokens=all", 'num_tokens: expected an integer, found "all"'),
    ],
)
async def test_bad_input_has_one_message(base_url: str, client: aiohttp.ClientSession, path: str, message: str) -> None:
    async with client.get(base_url + path) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["code"], error["message"]) == ("bad_request", message)


class StalledChild(EchoChild):
    """Sends one piece and then nothing until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    async def generate(self, message: str, num_tokens: int) -> AsyncIterator[str]:
        yield "only one"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


StalledChild.__contract__ = EchoChild.__contract__


async def test_a_chunk_comes_before_the_next_exists_and_a_client_that_leaves_stops_the_child(
    cluster: Cluster, client: aiohttp.ClientSession
) -> None:
    child = StalledChild()
    base_url = await ingress_to(cluster, child)
    async with client.get(f"{base_url}/echo/stream?message=hi&num_tokens=2") as answer:
        event = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), timeout=PATIENCE_S)
        assert b"only one" in event
        assert not child.cancelled
        answer.close()
    await until(lambda: child.cancelled, "the child's stream is cancelled")


async def test_its_twin_answers_alike_and_message_by_message_over_a_socket(
    cluster: Cluster, client: aiohttp.ClientSession
) -> None:
    know(await cluster.start(proto_child.Echo()))
    ingress = await cluster.start(proto_ingress.app)
    url = f"http://127.0.0.1:{ingress.http_port}/echo"
    async with client.get(url, params={"message": "grüezi"}) as answer:
        assert await answer.json() == {"response": "Echo: grüezi"}
    async with client.ws_connect(f"{url}/socket") as socket:
        for message in ("hi", "", "grüezi"):
            await socket.send_str(message)
            assert await socket.receive_str(timeout=PATIENCE_S) == f"Echo: {message}"
