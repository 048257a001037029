"""Calls the service "worker" very often and tells, now and then, what that has cost in memory: on either side.

`python -m tests.faults.programs.caller calls 1000000` or `... messages 1000000`: so many unary calls, 64 at a time, or
so many messages of one stream. A line of JSON on standard output for each tenth of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator

from pierhead import close_handles, handle
from pierhead.echo.v1.echo_pb2 import EchoRequest, GenerateRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from tests.faults.programs.life import end_with_the_test, memory

AT_A_TIME = 64
SAMPLES = 10

worker = handle(EchoStub, "worker", timeout_s=600.0)


async def calls(count: int) -> AsyncIterator[int]:
    """Make `count` unary calls; yields how many have been made after each tenth."""
    request = EchoRequest(message="0")

    async def one_after_the_other(turns: Iterator[int]) -> None:
        for _ in turns:
            await worker.Echo(request)

    for sample in range(SAMPLES):
        turns = iter(range(count // SAMPLES))
        await asyncio.gather(*[one_after_the_other(turns) for _ in range(AT_A_TIME)])
        yield (sample + 1) * (count // SAMPLES)


async def messages(count: int) -> AsyncIterator[int]:
    """Receive `count` messages; yields how many have come after each tenth."""
    received = 0
    async for _ in worker.Generate(GenerateRequest(message="0", num_tokens=count)):
        received += 1
        if received % (count // SAMPLES) == 0:
            yield received


async def main(kind: str, count: int) -> None:
    started = time.monotonic()
    async for done in {"calls": calls, "messages": messages}[kind](count):
        there = json.loads((await worker.Echo(EchoRequest(message="memory"))).response)
        seconds = time.monotonic() - started
        print(json.dumps({"done": done, "seconds": seconds, "caller": memory(), "replica": there}), flush=True)
    await close_handles()


if __name__ == "__main__":
    end_with_the_test()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
