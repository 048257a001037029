"""Streams whose source fails: before the first item, and later."""

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle

web = FastAPI()


@serve.deployment
class Source:
    async def items(self, fail_at: int):
        for number in range(4):
            if number == fail_at:
                raise ValueError(f"at {number}")
            yield f"{number};"


@serve.deployment
@serve.ingress(web)
class Ingress:
    def __init__(self, source: DeploymentHandle):
        self.source = source.options(stream=True)
        self.cleaned = 0

    @web.get("/stream")
    async def stream(self, fail_at: int):
        async def body():
            try:
                async for item in self.source.items.remote(fail_at):
                    yield item
            finally:
                self.cleaned += 1

        return StreamingResponse(body(), media_type="text/plain")

    @web.get("/caught")
    async def caught(self, fail_at: int):
        got = []
        try:
            async for item in self.source.items.remote(fail_at):
                got.append(item)
        except ValueError as error:
            got.append(f"at {fail_at}" in str(error))
        return got

    @web.get("/cleaned")
    async def count(self):
        return self.cleaned


app = Ingress.bind(Source.bind())
REQUESTS = [
    {"path": "/stream?fail_at=9"},
    {"path": "/stream?fail_at=2"},
    {"path": "/caught?fail_at=2"},
    {"path": "/caught?fail_at=0"},
    {"path": "/cleaned"},
]
