"""The echo's second service: answers and streams over gRPC. Run as `python -m services.echo.child`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pierhead import serve
from pierhead.echo.v1.echo_pb2 import EchoReply, EchoRequest, GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoServicer
from pierhead.errors import BadRequest

from services.echo.limits import MAX_TOKENS

GREETING = "Echo"


class Echo(EchoServicer):
    """Answers with the message it got."""

    def __init__(self) -> None:
        self._greeting = GREETING

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Take `greeting`, the word before each answer (default "Echo"). Raises ValueError for anything else."""
        greeting = user_config.get("greeting", GREETING)
        if not isinstance(greeting, str) or set(user_config) - {"greeting"}:
            raise ValueError(f"expected {{greeting: <some text>}} or {{}}, found {dict(user_config)}")
        self._greeting = greeting

    async def Echo(self, request: EchoRequest, context: Any) -> EchoReply:
        """Answer "Echo: " + message."""
        return EchoReply(response=f"{self._greeting}: {request.message}")

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
