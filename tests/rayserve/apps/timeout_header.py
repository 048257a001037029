"""A request's own timeout."""

import asyncio

from ray import serve
from starlette.requests import Request


@serve.deployment
class Slow:
    def __init__(self):
        self.cancelled = 0

    async def __call__(self, request: Request):
        try:
            await asyncio.sleep(float(request.query_params.get("s", 0)))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.cancelled


app = Slow.bind()
REQUESTS = [
    {"path": "/"},
    {"path": "/?s=30", "headers": {"x-request-timeout-seconds": "0.5", "x-request-id": "slow"}},
    {"path": "/?s=0.1", "headers": {"x-request-timeout-seconds": "20"}},
]
