"""A failed batch behind a real replica: what its callers and the log see of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pierhead import UserCodeError, batch, handle
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc

from tests.unit.runtime.harness import Cluster, EchoService, echo, errors, know, until


class Batched(EchoService):
    """Every batch waits at the gate, and fails."""

    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        self.calls += 1
        return echo_pb2.EchoReply(response=await self.shout(request.message))

    @batch(max_batch_size=8)
    async def shout(self, messages: list[str]) -> list[str]:
        self.begun += len(messages)
        await self.gate.wait()
        raise ValueError(f"boom, {len(messages)}")


async def fail(stub: Any) -> str:
    with pytest.raises(UserCodeError) as caught:
        await stub.Echo(echo())
    return str(caught.value)


async def test_one_failure_of_a_batch_has_one_error_id_and_one_line_in_the_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    service = Batched()
    know(await cluster.start(service, debug=True))
    stub: Any = handle(echo_pb2_grpc.EchoStub, "echo-child")
    calls = [asyncio.ensure_future(fail(stub))]
    await until(lambda: service.begun == 1, "a batch runs")
    calls += [asyncio.ensure_future(fail(stub)) for _ in range(2)]
    await until(lambda: service.calls == 3, "two calls are the next batch")
    service.gate.set()
    results = await asyncio.gather(*calls)
    assert results[1] == results[2] != results[0]
    assert "boom, 2" in results[1]
    assert len(errors(caplog)) == 2
