"""`pierhead llm sleep|wake|reset-prefix-cache`: every ready replica is asked, and each answer is shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pierhead import Unavailable
from pierhead.llm.server.service import LLMService
from pierhead.llm.v1.llm_pb2 import LLMRequest, Operation, OperationDone
from pierhead.llm.v1.llm_pb2_grpc import LLMServerServicer
from pierhead.llm_config import LLMConfig, ModelLoading

from controller.status.records.services import ReplicaStatus
from controller.tool.llm_replicas import ReplicaAnswer, operate
from tests.harness.ports import free_port
from tests.unit.controller.cli_documents import answered, replica, row
from tests.unit.controller.test_cli import Command
from tests.unit.runtime.harness import Cluster
from tests.unit.runtime.harness import address as address_of

WAKE = Operation(wake=Operation.Wake())


class Replica(LLMServerServicer):
    """Has the one method, and remembers what it was asked."""

    def __init__(self, refuse: str = "", held: asyncio.Event | None = None) -> None:
        self.asked: list[Operation] = []
        self._refuse = refuse
        self._held = held

    async def Operate(self, request: Operation, context: Any) -> OperationDone:
        self.asked.append(request)
        if self._held is not None:
            await self._held.wait()
        if self._refuse:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._refuse)
        return OperationDone()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


@contextlib.asynccontextmanager
async def api(*replicas: ReplicaStatus, **changes: Any) -> AsyncIterator[Command]:
    """The command, with an API that has one service."""
    service = row("llm-qwen", **{"protocol": "grpc", **changes, "replicas": replicas})

    async def answer(request: web.Request) -> web.Response:
        return answered(service)

    app = web.Application()
    app.router.add_get("/api/v1/services/llm-qwen", answer)
    async with TestServer(app) as server:
        yield Command(str(server.make_url("")).rstrip("/"))


async def test_every_ready_replica_is_asked(cluster: Cluster) -> None:
    one, two = Replica(), Replica("the engine mock has no sleep")  # type: ignore[abstract]
    first, second = [address_of(await cluster.start(each)) for each in (one, two)]
    starting = replica("p-llm-3", "STARTING", address="127.0.0.1:1")
    async with api(replica("p-llm-1", address=first), replica("p-llm-2", address=second), starting) as pierhead:
        done = await pierhead("llm", "sleep", "llm-qwen", "--level", "2")
    header, *lines = (line.split() for line in done.out.splitlines())
    assert header[:3] == ["REPLICA", "ADDRESS", "SLEEP"]
    assert [line[:3] for line in lines] == [["p-llm-1", first, "done"], ["p-llm-2", second, "no"]]
    assert one.asked == two.asked == [Operation(sleep=Operation.Sleep(level=2))]
    assert done.code == 1, "one of them did not do it"
    assert done.err.startswith("llm-qwen: 1 of 2 ready replicas did not do it: ")
    assert "the engine mock has no sleep" in done.err
    async with api(replica("p-llm-1", address=first)) as pierhead:
        done = await pierhead("llm", "wake", "llm-qwen", "-o", "json")
        assert (done.code, json.loads(done.out)) == (
            0,
            {
                "service": "llm-qwen",
                "operation": "wake",
                "replicas": [{"name": "p-llm-1", "address": first, "done": True, "message": ""}],
            },
        )
        assert (await pierhead("llm", "reset-prefix-cache", "llm-qwen")).code == 0
    assert [each.WhichOneof("what") for each in one.asked[1:]] == ["wake", "reset_prefix_cache"]


async def test_a_replica_of_a_language_model_sleeps_and_wakes(cluster: Cluster) -> None:
    server = LLMService(LLMConfig(engine="mock", model_loading=ModelLoading(model_id="qwen")))
    replicas = [("p-llm-1", address_of(await cluster.start(server)))]
    ask = LLMRequest(body=b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}', model="qwen")
    (answer,) = await asyncio.to_thread(operate, replicas, Operation(sleep=Operation.Sleep(level=1)), 20.0)
    assert answer.done
    with pytest.raises(Unavailable, match="sleeps"):
        await anext(server.Chat(ask, None))
    (answer,) = await asyncio.to_thread(operate, replicas, WAKE, 20.0)
    assert answer.done
    assert (await anext(server.Chat(ask, None))).status == 200


async def test_replicas_that_do_not_answer_say_why(cluster: Cluster) -> None:
    held, nowhere = asyncio.Event(), f"127.0.0.1:{free_port()}"
    slow = address_of(await cluster.start(Replica(held=held)))  # type: ignore[abstract]
    gone, late = await asyncio.to_thread(operate, [("p-llm-1", nowhere), ("p-llm-2", slow)], WAKE, 0.5)
    held.set()
    assert not gone.done
    assert gone.message.endswith(f"({nowhere} is reached from the controller's container: run the command there)")
    assert late == ReplicaAnswer(
        "p-llm-2", slow, False, "no answer within --timeout; the replica continues the operation", late=True
    )


async def test_what_cannot_be_asked_for() -> None:
    async with api(replica("p-llm-1", "STARTING")) as pierhead:
        done = await pierhead("llm", "wake", "llm-qwen")
    assert (done.code, done.err) == (1, "llm-qwen has no ready replica to wake; `pierhead why llm-qwen` says why\n")
    async with api(replica("p-llm-1"), protocol="http") as pierhead:
        done = await pierhead("llm", "wake", "llm-qwen")
    assert done.code == 2
    assert "is no language model" in done.err
