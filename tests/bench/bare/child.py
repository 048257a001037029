"""The echo's child with nothing of the runtime: a plain grpc.aio server. Run as `python -m tests.bench.bare.child`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
from pierhead.echo.v1.echo_pb2 import EchoReply, EchoRequest, GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoServicer, add_EchoServicer_to_server

from tests.bench.completion import CompletionStream


class Echo(EchoServicer):
    """As services/echo/app.py."""

    async def Echo(self, request: EchoRequest, context: Any) -> EchoReply:
        return EchoReply(response=f"Echo: {request.message}")

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[Token]:
        events = CompletionStream(request.message, request.num_tokens)
        for index in range(request.num_tokens):
            await asyncio.sleep(0)
            yield Token(text=events.chunk(index))


async def main() -> None:
    """Serve on PIERHEAD_HOST:PIERHEAD_PORT."""
    server = grpc.aio.server()
    add_EchoServicer_to_server(Echo(), server)
    server.add_insecure_port(f"{os.environ['PIERHEAD_HOST']}:{os.environ['PIERHEAD_PORT']}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
