"""HTTP requests beyond the line are refused, with the configured status."""

import asyncio

from ray import serve
from ray.serve.config import BackpressureConfig
from starlette.requests import Request


@serve.deployment(
    max_ongoing_requests=1,
    max_queued_requests=1,
    backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1.5),
)
class Slow:
    async def __call__(self, request: Request):
        await asyncio.sleep(float(request.query_params.get("s", 0)))
        return "done"


app = Slow.bind()
REQUESTS = [
    {"path": "/"},
    {
        "concurrent": [
            {"path": "/?s=4"},
            {"path": "/", "wait": 1.5},
            {"path": "/", "wait": 2.5},
            {"path": "/", "wait": 2.5},
        ]
    },
    {"path": "/"},
]
