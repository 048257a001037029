"""Batches and models behind a real replica, asked through a handle: what callers and clients see of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pierhead import ENDED, BadRequest, DeadlineExceeded, Ended, UserCodeError, batch, handle, multiplexed
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
from pierhead.request import MODEL_KEY, current_request

from tests.unit.runtime.harness import Cluster, echo, generate, know, until


class Batched(echo_pb2_grpc.EchoServicer):
    """Echo: a batch, within a model if the request names one. Generate: a batched stream of numbers."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.streams: list[list[int]] = []
        self.closed = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        if request.message == "model":
            return echo_pb2.EchoReply(response=await self.get_model())
        return echo_pb2.EchoReply(response=await self.shout(request.message))

    @multiplexed(max_num_models_per_replica=1)
    async def get_model(self, model_id: str) -> str:
        return f"the model {model_id}"

    @batch(max_batch_size=8, batch_wait_timeout_s=0.01)
    async def shout(self, messages: list[str]) -> list[str]:
        self.batches.append(messages)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if "boom" in messages:
            raise ValueError("boom")
        return [message.upper() for message in messages]

    async def Generate(self, request: echo_pb2.GenerateRequest, context: Any) -> AsyncIterator[echo_pb2.Token]:
        async for index in self.count(request.num_tokens):
            yield echo_pb2.Token(index=index)

    @batch(max_batch_size=8, batch_wait_timeout_s=0.01)
    async def count(self, counts: list[int]) -> AsyncIterator[list[int | Ended]]:
        self.streams.append(counts)
        try:
            for index in range(max(counts)):
                await self.gate.wait()
                yield [index if index < count else ENDED for count in counts]
        finally:
            self.closed += 1


@pytest.fixture
async def served(cluster: Cluster) -> tuple[Any, Batched]:
    service = Batched()
    know(await cluster.start(service))
    stub = handle(echo_pb2_grpc.EchoStub, "echo-child")
    await stub.Echo(echo("warm"))
    service.batches.clear()
    return stub, service


Served = tuple[Any, Batched]


async def test_calls_that_come_while_a_batch_runs_are_the_next_one(served: Served) -> None:
    stub, service = served
    service.gate.clear()
    calls = [asyncio.create_task(_reply(stub, "first"))]
    await until(lambda: service.batches == [["first"]], "a batch runs")
    calls += [asyncio.create_task(_reply(stub, message)) for message in "abc"]
    await until(lambda: len(service.shout._window) == 3, "the others wait")
    service.gate.set()
    assert list(await asyncio.gather(*calls)) == ["FIRST", "A", "B", "C"]
    assert [sorted(messages) for messages in service.batches] == [["first"], ["a", "b", "c"]]


async def test_an_exception_of_a_batch_has_one_id_for_all(served: Served) -> None:
    stub, service = served
    service.gate.clear()
    first = stub.Echo(echo("first"))
    await until(lambda: service.batches == [["first"]], "a batch runs")
    others = [asyncio.create_task(_reply(stub, message)) for message in ("boom", "c")]
    await until(lambda: len(service.shout._window) == 2, "the others wait")
    service.gate.set()
    await first
    results = await asyncio.gather(*others, return_exceptions=True)
    assert [type(result) for result in results] == [UserCodeError, UserCodeError]
    assert str(results[0]) == str(results[1])


async def _reply(stub: Any, message: str) -> str:
    return str((await stub.Echo(echo(message))).response)


async def test_a_caller_who_leaves_is_taken_out_and_the_last_one_ends_the_batch(served: Served) -> None:
    stub, service = served
    service.gate.clear()
    calls = [stub.Echo(echo(message)) for message in "ab"]
    await until(lambda: sum(map(len, service.batches)) >= 1, "a batch runs")
    for call in calls:
        call.cancel()
    await until(lambda: service.cancelled == len(service.batches), "the batch is cancelled")
    service.gate.set()
    assert await _reply(stub, "c") == "C"


async def test_a_call_past_its_deadline_is_not_computed(served: Served) -> None:
    stub, service = served
    service.gate.clear()
    first = stub.Echo(echo("a"))
    await until(lambda: service.batches == [["a"]], "a batch runs")
    with pytest.raises(DeadlineExceeded):
        await stub.Echo(echo("late"), timeout=0.05)
    await until(lambda: len(service.shout._window) == 0, "the replica knows, too: its clock began when the call came")
    service.gate.set()
    await first
    assert await _reply(stub, "b") == "B"
    assert service.batches == [["a"], ["b"]]


async def test_each_caller_gets_its_stream(served: Served) -> None:
    stub, service = served
    streams = await asyncio.gather(*[_read(stub, count) for count in (3, 1, 200)])
    assert list(streams) == [list(range(3)), list(range(1)), list(range(200))]
    await until(lambda: service.closed == len(service.streams), "every generator is closed")


async def _read(stub: Any, count: int) -> list[int]:
    return [token.index async for token in stub.Generate(generate(num_tokens=count))]


async def test_a_client_who_leaves_a_stream_harms_no_other_and_the_last_one_closes_it(served: Served) -> None:
    stub, service = served
    service.gate.clear()
    leaver, stayer = (stub.Generate(generate(num_tokens=100_000)) for _ in range(2))
    service.gate.set()
    for stream in (leaver, stayer):
        assert (await stream.read()).index == 0
    leaver.cancel()
    for index in range(1, 50):
        assert (await stayer.read()).index == index
    stayer.cancel()
    await until(lambda: service.closed == len(service.streams), "every generator is closed")


async def test_a_model_is_named_by_the_call(served: Served) -> None:
    stub, _ = served
    for model_id in ("a", "b", "a"):
        reply = await stub.Echo(echo("model"), metadata=((MODEL_KEY, model_id),))
        assert reply.response == f"the model {model_id}"


async def test_a_call_that_names_none_is_told_how(served: Served) -> None:
    stub, _ = served
    with pytest.raises(BadRequest, match="x-multiplexed-model-id: expected the id of a model in this header"):
        await stub.Echo(echo("model"))
    assert current_request() is None
