"""The peer's echo and stream: FastAPI ingress, one call to a child. The same answers as services/echo gives.

As in Ray's own benchmark the child makes the ready events of a stream, one by one, and the ingress passes them on. They
are made as ours are, which costs less than the pydantic models used there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import StreamingResponse

from tests.bench.completion import DONE, CompletionStream

api = FastAPI()

REPLICAS = int(os.environ.get("PEER_REPLICAS", "1"))


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=100_000)
class Child:
    """Repeats its input; generates one event in each turn of its loop, as a model does."""

    async def echo(self, message: str) -> str:
        return f"Echo: {message}"

    async def generate(self, message: str, num_tokens: int) -> AsyncIterator[bytes]:
        events = CompletionStream(message, num_tokens)
        for index in range(num_tokens):
            await asyncio.sleep(0)
            yield events.event(index)
        yield DONE


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=100_000)
@serve.ingress(api)
class Ingress:
    """Two routes, one call each."""

    def __init__(self, child: DeploymentHandle) -> None:
        self._child = child
        self._streaming = child.options(stream=True)

    @api.get("/echo")
    async def echo(self, message: str) -> dict[str, str]:
        return {"response": await self._child.echo.remote(message)}

    @api.get("/echo/stream")
    async def stream(self, message: str, num_tokens: int) -> StreamingResponse:
        events = self._streaming.generate.remote(message, num_tokens)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


application = Ingress.bind(Child.bind())  # type: ignore[attr-defined]  # what the decorators add
