"""A service with a contract from a .proto, proto/pierhead/echo/v1/echo.proto: `python -m services.echo_proto.child`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pierhead import BadRequest, serve
from pierhead.echo.v1.echo_pb2 import EchoReply, EchoRequest, GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoServicer


class Echo(EchoServicer):
    """Answers with the message it got."""

    async def Echo(self, request: EchoRequest, context: Any) -> EchoReply:
        """Answer "Echo: " + message."""
        return EchoReply(response=f"Echo: {request.message}")

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[Token]:
        """Stream `num_tokens` pieces, numbered from 0. Raises BadRequest for none."""
        if request.num_tokens < 1:
            raise BadRequest(f"num_tokens: expected at least 1, found {request.num_tokens}")
        for index in range(request.num_tokens):
            await asyncio.sleep(0)  # one in each turn of the loop, as a model hands them out
            yield Token(text=f"{request.message} {index}", index=index)


if __name__ == "__main__":
    serve(Echo())
