"""StreamingResponse from sync and async generators."""

import asyncio

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse


@serve.deployment
class Stream:
    def numbers(self, most):
        for number in range(most):
            yield f"{number}\n"

    async def slow(self, most):
        for number in range(most):
            await asyncio.sleep(0.01)
            yield f"data: {number}\n\n".encode()

    def __call__(self, request: Request):
        most = int(request.query_params.get("most", 3))
        if request.url.path == "/slow":
            return StreamingResponse(self.slow(most), media_type="text/event-stream", status_code=202)
        return StreamingResponse(self.numbers(most), media_type="text/plain", headers={"x-stream": "yes"})


app = Stream.bind()
REQUESTS = [{"path": "/?most=5"}, {"path": "/slow?most=4"}, {"path": "/?most=0"}]
