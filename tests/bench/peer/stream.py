"""The peer's stream: FastAPI ingress, server-sent events that a child generates one by one.

As in Ray's own benchmark the child makes the ready events and the ingress passes them on. They are made by our
encoder, which costs less than the pydantic models used there.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import StreamingResponse

from services.echo.completion import DONE, CompletionStream

api = FastAPI()


@serve.deployment(max_ongoing_requests=10_000)
class Child:
    """Generates one event in each turn of its loop, as a model does."""

    async def generate(self, message: str, num_tokens: int) -> AsyncIterator[bytes]:
        events = CompletionStream(f"cmpl-{uuid.uuid4().hex[:24]}", int(time.time()), "echo")
        for index in range(num_tokens):
            await asyncio.sleep(0)
            yield events.event(f"{message} {index}", last=index == num_tokens - 1)
        yield DONE


@serve.deployment(max_ongoing_requests=10_000)
@serve.ingress(api)
class Ingress:
    """One route, one streamed call."""

    def __init__(self, child: DeploymentHandle) -> None:
        self._child = child.options(stream=True)

    @api.get("/echo/stream")
    async def stream(self, message: str, num_tokens: int) -> StreamingResponse:
        events = self._child.generate.remote(message, num_tokens)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


application = Ingress.bind(Child.bind())  # type: ignore[attr-defined]  # what the decorators add
