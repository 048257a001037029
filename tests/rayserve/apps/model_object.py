"""Actions on a handle: shared counters through a deployment with one replica."""

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

web = FastAPI()


@serve.deployment(num_replicas=1)
class Store:
    def __init__(self):
        self.data = {}

    async def put(self, key, value):
        self.data[key] = value

    async def get(self, key, default=None):
        return self.data.get(key, default)


@serve.deployment(num_replicas=2)
@serve.ingress(web)
class Api:
    def __init__(self, store: DeploymentHandle):
        self.store = store

    @web.put("/kv/{key}")
    async def put(self, key: str, value: str):
        await self.store.put.remote(key, value)
        return {"put": key}

    @web.get("/kv/{key}")
    async def get(self, key: str):
        return await self.store.get.remote(key, default="none")


app = Api.bind(Store.bind())
REQUESTS = [
    {"method": "PUT", "path": "/kv/a?value=1"},
    {"path": "/kv/a"},
    {"path": "/kv/b"},
    {"method": "PUT", "path": "/kv/a?value=2"},
    {"path": "/kv/a"},
]
