"""A replica whose capacity is known: each call takes the time that it asks for, on no processor.

Run as `python -m tests.faults.programs.worker`. `message` is how long to take, in milliseconds; every reply names the
replica (PIERHEAD_REPLICA). The message "memory" asks for what this process holds. With PIERHEAD_TURNS calls are counted
in that directory (turns.py).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

from pierhead import serve
from pierhead.echo.v1.echo_pb2 import EchoReply, EchoRequest, GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoServicer

from tests.faults.programs import turns
from tests.faults.programs.life import end_with_the_test, memory

NAME = os.environ.get("PIERHEAD_REPLICA", "")
DIRECTORY = os.environ.get("PIERHEAD_TURNS", "")


class Worker(EchoServicer):
    def __init__(self) -> None:
        self._turns = turns.of_worker(DIRECTORY, NAME) if DIRECTORY else None

    async def Echo(self, request: EchoRequest, context: Any) -> EchoReply:
        if request.message == "memory":
            return EchoReply(response=json.dumps(memory()))
        await _work(request.message)
        if self._turns is not None:
            self._turns[0] += 1
        return EchoReply(response=NAME)

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[Token]:
        for index in range(request.num_tokens):
            await _work(request.message)
            yield Token(text=NAME, index=index)


async def _work(milliseconds: str) -> None:
    if milliseconds != "0":
        await asyncio.sleep(float(milliseconds) / 1000)


if __name__ == "__main__":
    end_with_the_test()
    serve(Worker())
