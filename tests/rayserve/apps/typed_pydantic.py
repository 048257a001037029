"""Pydantic models over handles, returned as JSON."""

from pydantic import BaseModel
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


class Query(BaseModel):
    text: str
    limit: int = 2


class Answer(BaseModel):
    words: list[str]
    query: Query


@serve.deployment
class Splitter:
    def split(self, query: Query) -> Answer:
        return Answer(words=query.text.split()[: query.limit], query=query)


@serve.deployment
class Ingress:
    def __init__(self, splitter: DeploymentHandle):
        self.splitter = splitter

    async def __call__(self, request: Request):
        return await self.splitter.split.remote(Query(**await request.json()))


app = Ingress.bind(Splitter.bind())
REQUESTS = [{"method": "POST", "path": "/", "json": {"text": "a b c"}}, {"method": "POST", "path": "/", "json": {}}]
