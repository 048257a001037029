"""An ingress that awaits two models at a time."""

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


@serve.deployment
class Adder:
    def __init__(self, increment: int):
        self.increment = increment

    def add(self, x: int) -> int:
        return x + self.increment


@serve.deployment
class Multiplier:
    def __init__(self, factor: int):
        self.factor = factor

    async def __call__(self, x: int) -> int:
        return x * self.factor


@serve.deployment
class Ingress:
    def __init__(self, adder: DeploymentHandle, multiplier: DeploymentHandle):
        self.adder = adder
        self.multiplier = multiplier

    async def __call__(self, request: Request):
        x = int(request.query_params["x"])
        added, multiplied = await asyncio.gather(self.adder.add.remote(x), self.multiplier.remote(x))
        return {"added": added, "multiplied": multiplied}


app = Ingress.bind(Adder.bind(5), Multiplier.bind(factor=10))
REQUESTS = [{"path": "/?x=4"}, {"path": "/?x=-1"}, {"path": "/"}]
