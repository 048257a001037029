"""Bound deployments within objects of the application's own."""

from dataclasses import dataclass

from ray import serve
from ray.serve.handle import DeploymentHandle


@dataclass
class Models:
    fast: DeploymentHandle
    others: dict


class Holder:
    def __init__(self, inner):
        self.inner = inner

    def get(self):
        return self.inner


@serve.deployment
class Model:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


@serve.deployment
class Ingress:
    def __init__(self, models, *, holder):
        self.models = models
        self.holder = holder

    async def __call__(self, request):
        fast = await self.models.fast.remote(1)
        other = await self.models.others["slow"][0].remote(1)
        held = await self.holder.get().remote(1)
        return [fast, other, held]


slow = Model.bind(3)
app = Ingress.bind(Models(Model.bind(2), {"slow": [slow]}), holder=Holder(slow))
REQUESTS = [{"path": "/"}]
