"""A batched method behind a FastAPI route, and its model in a batch of its own."""

from typing import List

from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

api = FastAPI()


class Text(BaseModel):
    text: str


@serve.deployment(max_ongoing_requests=16)
@serve.ingress(api)
class BatchTextGenerator:
    @serve.batch(max_batch_size=3, batch_wait_timeout_s=2)
    async def handle_batch(self, inputs: List[Text]) -> List[str]:
        longest = max(len(each.text) for each in inputs)
        return [each.text.ljust(longest, ".") + str(len(inputs)) for each in inputs]

    @api.post("/generate")
    async def generate(self, text: Text):
        return {"generated": await self.handle_batch(text)}


app = BatchTextGenerator.bind()
REQUESTS = [
    {"concurrent": [{"method": "POST", "path": "/generate", "json": {"text": "x" * n}} for n in (1, 3, 5)]},
    {"method": "POST", "path": "/generate", "json": {"words": 1}},
]
