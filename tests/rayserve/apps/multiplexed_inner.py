"""The model id goes to the deployment that the caller names it for."""

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


class Model:
    def __init__(self, model_id, log):
        self.model_id = model_id
        self.log = log

    def __del__(self):
        self.log.append(f"gone {self.model_id}")


@serve.deployment
class Inner:
    def __init__(self):
        self.log = []

    @serve.multiplexed(max_num_models_per_replica=1)
    async def load(self, model_id):
        return Model(model_id, self.log)

    async def __call__(self, text):
        model_id = serve.get_multiplexed_model_id()
        if model_id:
            await self.load(model_id)
        return [model_id, text, list(self.log)]


@serve.deployment
class Outer:
    def __init__(self, inner: DeploymentHandle):
        self.inner = inner

    async def __call__(self, request: Request):
        own = serve.get_multiplexed_model_id()
        plain = await self.inner.remote("plain")
        named = await self.inner.options(multiplexed_model_id=own or "fallback").remote("named")
        return [own, plain, named]


app = Outer.bind(Inner.bind())
REQUESTS = [
    {"path": "/"},
    {"path": "/", "headers": {"serve_multiplexed_model_id": "m"}},
    {"path": "/"},
]
