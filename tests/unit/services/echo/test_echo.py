"""The two echo services, real ones, calling each other on loopback ports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from pierhead import BadRequest, handle
from pierhead.echo.v1.echo_pb2 import GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from services.echo.child import Echo
from services.echo.ingress import make_app
from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, know, until


@pytest.fixture
async def base_url(cluster: Cluster) -> str:
    return await ingress_to(cluster, Echo())


async def ingress_to(cluster: Cluster, child: Echo) -> str:
    know(await cluster.start(child))
    ingress = await cluster.start(make_app(handle(EchoStub, "echo-child")))
    return f"http://127.0.0.1:{ingress.http_port}"


async def test_echo(base_url: str, client: aiohttp.ClientSession) -> None:
    for message in ("hi", "", "a b&c", "grüezi"):
        async with client.get(f"{base_url}/echo", params={"message": message}) as answer:
            assert answer.status == 200
            assert await answer.json() == {"response": f"Echo: {message}"}


async def test_the_greeting_is_a_setting(cluster: Cluster, client: aiohttp.ClientSession) -> None:
    child = Echo()
    url = await ingress_to(cluster, child)
    child.reconfigure({"greeting": "Ahoy"})
    for wrong in ({"greeting": 7}, {"greting": "Moin"}):
        with pytest.raises(ValueError, match=r"expected \{greeting: <some text>\} or \{\}, found"):
            child.reconfigure(wrong)
    async with client.get(f"{url}/echo", params={"message": "hi"}) as answer:
        assert await answer.json() == {"response": "Ahoy: hi"}
    child.reconfigure({})
    async with client.get(f"{url}/echo", params={"message": "hi"}) as answer:
        assert await answer.json() == {"response": "Echo: hi"}


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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/echo", "message: missing in the query string; send /echo?message=hi (it may be empty)"),
        ("/echo/stream", "message: missing in the query string; send /echo/stream?message=hi (it may be empty)"),
        *(
            (
                f"/echo/stream?message=hi&num_tokens={wrong}",
                f'num_tokens: expected an integer from 1 to 100000, found "{wrong}"',
            )
            for wrong in ("0", "100001", "1_0")
        ),
    ],
)
async def test_bad_input_gets_one_message(
    base_url: str, client: aiohttp.ClientSession, path: str, message: str
) -> None:
    async with client.get(base_url + path) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["code"], error["message"]) == ("bad_request", message)


async def test_the_child_bounds_a_stream_by_itself(cluster: Cluster) -> None:
    know(await cluster.start(Echo()))
    child = handle(EchoStub, "echo-child")
    for num_tokens in (0, 100_001):
        stream = aiter(child.Generate(GenerateRequest(message="hi", num_tokens=num_tokens)))
        with pytest.raises(BadRequest, match=f"^num_tokens: expected 1 to 100000, found {num_tokens}$"):
            await anext(stream)


class StalledEcho(Echo):
    """Sends one token and then nothing until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[Token]:
        yield Token(text="only one", index=0)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_a_chunk_comes_before_the_next_exists_and_a_client_that_leaves_stops_the_child(
    cluster: Cluster, client: aiohttp.ClientSession
) -> None:
    child = StalledEcho()
    base_url = await ingress_to(cluster, child)
    async with client.get(f"{base_url}/echo/stream?message=hi&num_tokens=2") as answer:
        event = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), timeout=PATIENCE_S)
        assert b"only one" in event
        assert not child.cancelled
        answer.close()
    await until(lambda: child.cancelled, "the child's stream is cancelled")


async def test_a_socket_echoes_message_by_message(base_url: str, client: aiohttp.ClientSession) -> None:
    async with client.ws_connect(f"{base_url}/echo/socket") as socket:
        for message in ("hi", "", "grüezi"):
            await socket.send_str(message)
            assert await socket.receive_str(timeout=PATIENCE_S) == f"Echo: {message}"
