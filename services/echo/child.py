"""The echo's second service: answers and streams over gRPC. Run as `python -m services.echo.child`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pierhead import serve
from pierhead.echo.v1.echo_pb2 import EchoReply, EchoRequest, GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoServicer
from pierhead.errors import BadRequest

from services.echo.limits import MAX_TOKENS


class Echo(EchoServicer):
    """Says what it is told."""

    async def Echo(self, request: EchoRequest, context: Any) -> EchoReply:
        """Answer "Echo: " + message."""
        return EchoReply(response=f"Echo: {request.message}")

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[Token]:
        """Stream `num_tokens` pieces, numbered from 0. Raises BadRequest outside 1 to MAX_TOKENS."""
        if not 1 <= request.num_tokens <= MAX_TOKENS:
            raise BadRequest(f"num_tokens: expected 1 to {MAX_TOKENS}, found {request.num_tokens}")
        for index in range(request.num_tokens):
            # As a model hands them out: one in each turn of the loop. Without it a whole answer could leave at once.
            await asyncio.sleep(0)
            yield Token(text=f"{request.message} {index}", index=index)


if __name__ == "__main__":
    serve(Echo())
