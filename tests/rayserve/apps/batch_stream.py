"""A batched generator; callers that end early by StopIteration."""

import asyncio

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse


@serve.deployment(max_ongoing_requests=20)
class Textgen:
    @serve.batch(max_batch_size=3, batch_wait_timeout_s=1.0)
    async def generate(self, prompts: list[str]):
        for step in range(3):
            await asyncio.sleep(0.01)
            yield [f"{prompt}{step}/{len(prompts)} " if step <= len(prompt) else StopIteration for prompt in prompts]

    async def __call__(self, request: Request):
        return StreamingResponse(self.generate(request.query_params["p"]), media_type="text/plain")


app = Textgen.bind()
REQUESTS = [{"concurrent": [{"path": "/?p=a"}, {"path": "/?p=bb"}, {"path": "/?p=ccc"}]}]
