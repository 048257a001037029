"""Streams whose replica writes to the client itself: what clients see is the same as through the gateway.

A gateway in this process, a replica of the mock engine in one that a test may kill, with and without shared memory.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pierhead import Settings, close_handles
from pierhead.calls.clients import Clients
from pierhead.llm.gateway.app import make_app
from pierhead.llm.gateway.exchange import ClientExchange
from pierhead.llm.gateway.metrics import GatewayMetrics
from pierhead.llm.gateway.models.model_map import VARIABLE, read_models
from pierhead.llm.gateway.settings import GatewaySettings
from pierhead.llm.v1.llm_pb2 import LLMReply
from pierhead.memory import process as memory_of
from pierhead.request import TIMEOUT_KEY

from tests.harness.ports import free_ports
from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, until

PATH = "/v1/chat/completions"
MEMORY = 1 << 20
SERVER = "import runpy; runpy.run_module('pierhead.llm.server', run_name='__main__')"
LARGE = 60_000
"""Tokens of an answer that no connection's buffers hold."""
FAST = {"tokens_per_s": 1e6, "step_s": 0.01, "max_model_len": 2 * LARGE}
SLOW = {"tokens_per_s": 20.0, "step_s": 0.05}
"""An answer lasts until something happens to it."""


class Place:
    """One gateway, one replica."""

    def __init__(self, cluster: Cluster, client: aiohttp.ClientSession, directory: Path, *, lends: bool) -> None:
        self.cluster, self.client, self.lends = cluster, client, lends
        self.directory = str(directory)
        self.metrics = GatewayMetrics()
        self.relayed: list[LLMReply] = []
        """What has passed through the gateway."""

    async def start(self, **engine: Any) -> None:
        port, self.admin = free_ports(2)
        config = {"engine": "mock", "model_loading": {"model_id": "m"}, "engine_kwargs": engine}
        shared = {"PIERHEAD_SHARED_MEMORY_BYTES": str(MEMORY), "PIERHEAD_SHARED_MEMORY_DIR": self.directory}
        self.replica = await self.cluster.process(
            SERVER, port, PIERHEAD_LLM_CONFIG=json.dumps(config), PYTHONPATH=".", **(shared if self.lends else {})
            | {"PIERHEAD_ADMIN_PORT": str(self.admin), "PIERHEAD_SERVICE": "llm"},
        )  # fmt: skip
        Clients.use(Settings(static={"LLM": (f"127.0.0.1:{port}",)}))
        app = make_app(GatewaySettings(read_models({VARIABLE: json.dumps({"m": "llm"})})), self.metrics)
        memory = {"shared_memory_bytes": MEMORY, "shared_memory_dir": self.directory} if self.lends else {}
        self.gateway = await self.cluster.start(app, service="gateway", **memory)
        self.url = f"http://127.0.0.1:{self.gateway.http_port}"
        await until(self.is_met, "the gateway knows the model, and the two processes are linked")

    async def is_met(self) -> bool:
        async with self.client.get(self.url + "/v1/models") as answer:
            known = bool((await answer.json())["data"])
        memory = memory_of.MEMORY
        return known and (not self.lends or (memory is not None and len(memory.links) == 1))

    async def ask(self, tokens: int, **more: Any) -> aiohttp.ClientResponse:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
        return await self.client.post(self.url + PATH, json=body | more, timeout=aiohttp.ClientTimeout(PATIENCE_S))

    async def connect(self, tokens: int, *headers: str, http: str = "1.1", receives: int = 0) -> socket.socket:
        """A client that has asked, and has read nothing."""
        connection = socket.socket()
        if receives:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", self.gateway.http_port))
        body = json.dumps({"model": "m", "prompt": "hi", "max_tokens": tokens, "stream": True}).encode()
        head = [f"POST /v1/completions HTTP/{http}", "Host: m", "Content-Type: application/json", *headers]
        head.append(f"Content-Length: {len(body)}")
        await loop.sock_sendall(connection, "\r\n".join([*head, "", ""]).encode() + body)
        return connection

    async def is_idle(self) -> bool:
        """Whether neither process has a request."""
        async with self.client.get(f"http://127.0.0.1:{self.admin}/readyz") as answer:
            return not (await answer.json())["ongoing"] and not self.gateway.edge.admission.ongoing

    def codes(self) -> list[str]:
        return [labels[3] for labels in self.metrics.requests.values]


@pytest.fixture(params=["lent", "relayed"])
async def place(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Place]:
    noted = ClientExchange._noted
    async with aiohttp.ClientSession() as client:
        made = Place(cluster, client, tmp_path, lends=request.param == "lent")

        def note(exchange: ClientExchange, reply: LLMReply) -> bytes:
            made.relayed.append(reply)
            return noted(exchange, reply)

        monkeypatch.setattr(ClientExchange, "_noted", note)
        yield made
        await close_handles()


async def read_all(connection: socket.socket) -> bytes:
    with connection:
        found, loop = bytearray(), asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            while piece := await loop.sock_recv(connection, 1 << 20):
                found += piece
    return bytes(found)


def texts(body: bytes) -> int:
    """Events with text."""
    events = [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]
    return sum(bool(choice.get("text") or choice.get("delta", {}).get("content"))
               for event in events for choice in event.get("choices", ()))  # fmt: skip


async def test_an_answer_and_its_accounts_are_the_same(place: Place) -> None:
    await place.start(**SLOW)
    answer = await place.ask(40, stream_options={"include_usage": True})
    body = await answer.read()
    assert (answer.status, answer.content_type, texts(body)) == (200, "text/event-stream", 40)
    assert body.endswith(b"data: [DONE]\n\n")
    assert b'"completion_tokens":40' in body.replace(b" ", b"")
    assert sum(reply.tokens for reply in place.relayed) == 40
    passed = sum(bool(reply.data) for reply in place.relayed)
    assert (passed, answer.headers.get("Connection")) == ((2, "close") if place.lends else (passed, None))
    assert place.metrics.tokens.values["m", "llm", "completion", ""] == 40


async def test_an_error_before_the_first_token_has_its_status(place: Place) -> None:
    await place.start(**SLOW)
    answer = await place.ask(1_000_000)
    error = (await answer.json())["error"]
    assert (answer.status, error["code"], answer.headers.get("Connection")) == (400, "context_length_exceeded", None)


async def test_a_client_that_cannot_read_chunks_gets_its_answer_through_the_gateway(place: Place) -> None:
    await place.start(**FAST)
    body = await read_all(await place.connect(50, http="1.0"))
    assert texts(body.partition(b"\r\n\r\n")[2]) == 50


async def test_a_client_that_leaves_ends_its_request_everywhere(place: Place) -> None:
    await place.start(**SLOW)
    answer = await place.ask(1000)
    await answer.content.readuntil(b"\n\n")
    answer.close()
    await until(place.is_idle, "neither has the request any more")
    assert place.codes() == ["499"]


async def test_a_replica_that_dies_is_told_in_the_stream(place: Place) -> None:
    await place.start(**SLOW)
    answer = await place.ask(1000)
    await answer.content.readuntil(b'"content": "')
    place.replica.kill()
    body = await answer.read()  # to its end
    assert json.loads(body.split(b"\n\n")[-2][6:])["error"]["code"] == "replica_died", body
    assert place.codes() == ["502"]


async def test_an_engine_that_fails_is_told_in_the_stream(place: Place) -> None:
    await place.start(**SLOW, fail_after_tokens=5)
    body = await (await place.ask(1000)).read()
    assert json.loads(body.split(b"\n\n")[-2][6:])["error"]["code"] == "internal", body


async def test_a_slow_client_stops_its_own_stream_alone(place: Place) -> None:
    await place.start(**FAST)
    slow = await place.connect(LARGE, "Connection: close", receives=4096)
    for _ in range(20):
        answer = await place.ask(100)
        assert texts(await answer.read()) == 100
    assert not await place.is_idle()
    body = await read_all(slow)
    assert body.count(b"data: {") >= LARGE
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await until(place.is_idle, "neither has the request any more")


async def test_a_client_that_does_not_read_is_given_up_at_its_deadline(place: Place) -> None:
    await place.start(**FAST)
    with await place.connect(LARGE, f"{TIMEOUT_KEY}: 1", receives=4096):
        await until(lambda: place.gateway.edge.admission.ongoing == 1, "it has begun")
        await until(place.is_idle, "neither has the request any more")
    assert place.codes() == ["504"]


@pytest.mark.parametrize("who", ["gateway", "replica"])
async def test_a_drain_waits_for_its_streams(place: Place, who: str) -> None:
    await place.start(**SLOW)
    answer = await place.ask(40)
    await answer.content.readuntil(b"\n\n")
    if who == "gateway":
        place.gateway.stop()
    else:
        place.replica.terminate()
    assert texts(await answer.read()) >= 39  # the first one was read above, or the role alone
    await until(lambda: place.codes() == ["200"], "it has ended well")
