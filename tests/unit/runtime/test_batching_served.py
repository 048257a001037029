"""Batches and models behind a real replica, asked through a handle: what callers and clients see of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pierhead import ENDED, DeadlineExceeded, Ended, UserCodeError, batch, handle
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc

from tests.unit.runtime.harness import Cluster, echo, generate, know, until


class Batched(echo_pb2_grpc.EchoServicer):
    """Echo: a batch. Generate: a batched stream of numbers."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.streams: list[list[int]] = []
        self.closed = 0
        self.asked = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        self.asked += 1
        return echo_pb2.EchoReply(response=await self.shout(request.message))

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
    service.asked = 0
    return stub, service


Served = tuple[Any, Batched]


async def test_calls_that_come_while_a_batch_runs_are_the_next_one(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    stub, service = served
    service.gate.clear()
    calls = [asyncio.create_task(_reply(stub, "first"))]
    await until(lambda: service.batches == [["first"]], "a batch runs")
    calls += [asyncio.create_task(_reply(stub, message)) for message in ("boom", "c")]
    await until(lambda: service.asked == 3, "the others wait")
    service.gate.set()
    first, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert first == "FIRST"
    assert [sorted(messages) for messages in service.batches] == [["first"], ["boom", "c"]]
    assert [type(result) for result in others] == [UserCodeError, UserCodeError]
    assert str(others[0]) == str(others[1]), "one failure has one error id"
    assert [record.levelname for record in caplog.records if record.name == "pierhead"] == ["ERROR"], (
        "and is logged once"
    )


async def _reply(stub: Any, message: str) -> str:
    return str((await stub.Echo(echo(message))).response)


async def test_a_call_past_its_deadline_is_not_computed(served: Served) -> None:
    stub, service = served
    service.gate.clear()
    first = stub.Echo(echo("a"))
    await until(lambda: service.batches == [["a"]], "a batch runs")
    with pytest.raises(DeadlineExceeded):
        await stub.Echo(echo("late"), timeout=0.05)
    service.gate.set()
    await first
    assert await _reply(stub, "b") == "B"
    assert service.batches == [["a"], ["b"]]


async def test_a_client_that_leaves_a_stream_harms_no_other_and_the_last_one_closes_it(served: Served) -> None:
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
