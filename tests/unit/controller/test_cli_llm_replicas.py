"""`pierhead llm sleep|wake|reset-prefix-cache`: every ready replica is asked, and what each answered is told."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pierhead import Unavailable
from pierhead.llm.v1.llm_pb2 import LLMRequest, Operation, OperationDone
from pierhead.llm_config import LLMConfig, ModelLoading

from services.llm.server.service import LLMServer
from tests.harness.ports import free_port
from tests.unit.controller.cli_documents import replica, row
from tests.unit.runtime.harness import Cluster
from tests.unit.runtime.harness import address as address_of

ROOT = Path(__file__).resolve().parents[3]


class Replica:
    """Has the one method, and remembers what it was asked."""

    def __init__(self, refuse: str = "", held: asyncio.Event | None = None) -> None:
        self.asked: list[Operation] = []
        self._refuse = refuse
        self._held = held
        self.address = ""

    async def start(self) -> grpc.aio.Server:
        operate = grpc.unary_unary_rpc_method_handler(
            self._operate,
            request_deserializer=Operation.FromString,
            response_serializer=OperationDone.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler("pierhead.llm.v1.LLMServer", {"Operate": operate})
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        return server

    async def _operate(self, request: Operation, context: Any) -> OperationDone:
        self.asked.append(request)
        if self._held is not None:
            await self._held.wait()
        if self._refuse:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._refuse)
        return OperationDone()


Start = Callable[[Replica], Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    servers = []

    async def start(replica: Replica) -> Replica:
        servers.append(await replica.start())
        return replica

    yield start
    for server in servers:
        await server.stop(None)


class Api:
    """The controller's API with one service."""

    def __init__(self) -> None:
        self.service: dict[str, Any] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        return web.json_response(self.service)

    def has(self, *replicas: dict[str, Any], **changes: Any) -> None:
        self.service = row("llm-qwen", **{"protocol": "grpc", **changes, "replicas": list(replicas)})


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    made = Api()
    app = web.Application()
    app.router.add_get("/api/v1/services/llm-qwen", made.answer)
    async with TestServer(app) as server:
        made.url = str(server.make_url("")).rstrip("/")
        yield made


async def run(api: Api, *arguments: str) -> tuple[int, str, str]:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT}/services/runtime", "PATH": "/usr/bin:/bin"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controller.cli", "llm", *arguments),
        env=environment | {"PIERHEAD_API_URL": api.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
    )
    async with asyncio.timeout(60):
        told, problem = await process.communicate()
    return process.returncode or 0, told.decode(), problem.decode()


async def test_every_ready_replica_is_asked(api: Api, start: Start) -> None:
    one, two = await start(Replica()), await start(Replica())
    starting = replica("p-llm-3", "STARTING", address="127.0.0.1:1")
    api.has(replica("p-llm-1", address=one.address), replica("p-llm-2", address=two.address), starting)
    code, told, problem = await run(api, "sleep", "llm-qwen", "--level", "2")
    assert (code, problem) == (0, "")
    assert [line.split() for line in told.splitlines()] == [
        ["REPLICA", "ADDRESS", "SLEEP"],
        ["p-llm-1", one.address, "done"],
        ["p-llm-2", two.address, "done"],
    ]
    assert one.asked == two.asked == [Operation(sleep=Operation.Sleep(level=2))]
    api.has(replica("p-llm-1", address=one.address))
    code, told, _ = await run(api, "wake", "llm-qwen", "-o", "json")
    assert (code, json.loads(told)) == (
        0,
        {
            "service": "llm-qwen",
            "operation": "wake",
            "replicas": [{"name": "p-llm-1", "address": one.address, "done": True, "message": ""}],
        },
    )
    assert (await run(api, "reset-prefix-cache", "llm-qwen"))[0] == 0
    assert [each.WhichOneof("what") for each in one.asked[1:]] == ["wake", "reset_prefix_cache"]


async def test_a_replica_of_a_language_model_sleeps_and_wakes(api: Api, tmp_path: Path) -> None:
    config = LLMConfig(engine="mock", model_loading=ModelLoading(model_id="qwen"))
    cluster = Cluster()
    server = LLMServer(config, tmp_path)
    address = address_of(await cluster.start(server))
    api.has(replica("p-llm-1", address=address))
    ask = LLMRequest(body=b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}', model="qwen")
    assert (await run(api, "sleep", "llm-qwen"))[0] == 0
    with pytest.raises(Unavailable, match="sleeps"):
        await anext(server.Chat(ask, None))
    assert (await run(api, "wake", "llm-qwen"))[0] == 0
    assert (await anext(server.Chat(ask, None))).status == 200
    await cluster.close()


async def test_one_that_refuses_says_why_and_the_others_do_it(api: Api, start: Start) -> None:
    one, two = await start(Replica("the engine mock has no sleep")), await start(Replica())
    api.has(replica("p-llm-1", address=one.address), replica("p-llm-2", address=two.address))
    code, told, problem = await run(api, "sleep", "llm-qwen")
    assert code == 1
    assert "the engine mock has no sleep" in told
    assert problem == "llm-qwen: 1 of 2 ready replicas did not do it: the engine mock has no sleep\n"
    assert len(two.asked) == 1


async def test_one_that_does_not_answer_says_why(api: Api, start: Start) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    api.has(replica("p-llm-1", address=nowhere))
    code, _, problem = await run(api, "wake", "llm-qwen")
    assert code == 1
    assert f"({nowhere} is reached from the controller's container: run the command there)" in problem
    held = asyncio.Event()
    api.has(replica("p-llm-1", address=(await start(Replica(held=held))).address))
    code, told, _ = await run(api, "wake", "llm-qwen", "--timeout", "0.5")
    held.set()
    assert code == 4
    assert "no answer within --timeout" in told


async def test_what_cannot_be_asked_for(api: Api) -> None:
    api.has(replica("p-llm-1", "STARTING"))
    code, _, problem = await run(api, "wake", "llm-qwen")
    assert (code, problem) == (1, "llm-qwen has no ready replica to wake; `pierhead why llm-qwen` says why\n")
    api.has(replica("p-llm-1"), protocol="http")
    code, _, problem = await run(api, "wake", "llm-qwen")
    assert code == 2
    assert "is no language model" in problem
