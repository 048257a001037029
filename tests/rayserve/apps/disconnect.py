"""A client that leaves: its request is cancelled, and what that has called."""

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import StreamingResponse


@serve.deployment(max_ongoing_requests=10)
class Inner:
    def __init__(self):
        self.cancelled = []

    async def work(self, name):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise

    async def items(self):
        try:
            while True:
                yield "x"
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.cancelled.append("items")
            raise

    def names(self):
        return sorted(self.cancelled)


@serve.deployment(max_ongoing_requests=10)
class Outer:
    def __init__(self, inner: DeploymentHandle):
        self.inner = inner
        self.cancelled = []

    async def __call__(self, request: Request):
        if request.url.path == "/count":
            while len(await self.inner.names.remote()) < 3:
                await asyncio.sleep(0.02)
            return [self.cancelled, await self.inner.names.remote()]
        if request.url.path == "/stream":
            return StreamingResponse(self.inner.options(stream=True).items.remote())
        try:
            await asyncio.gather(self.inner.work.remote("a"), self.inner.work.remote("b"))
        except asyncio.CancelledError:
            self.cancelled.append("outer")
            raise


app = Outer.bind(Inner.bind())
REQUESTS = [
    {"abandon": "/", "after": 1.5},
    {"abandon": "/stream", "after": 1.5},
    {"path": "/count", "headers": {"x-request-timeout-seconds": "30"}},
]
