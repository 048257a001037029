"""A route chosen by the first model's answer; one response used twice; results as they come."""

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse


@serve.deployment
class Classify:
    async def __call__(self, x: float) -> str:
        return "big" if x > 10 else "small"


@serve.deployment
class Scale:
    def __init__(self, factor: float = 1.0, *, delay: float = 0.0):
        self.factor = factor
        self.delay = delay

    async def run(self, x: float, label: str = "none") -> dict:
        await asyncio.sleep(self.delay)
        return {"value": self.factor * x, "label": label}


@serve.deployment
class Route:
    def __init__(self, classify: DeploymentHandle, **models: DeploymentHandle):
        self.classify = classify
        self.models = models

    async def __call__(self, x: float):
        label: DeploymentResponse = self.classify.remote(x)
        chosen = self.models[await label]
        first = chosen.run.remote(x, label)
        second = self.models["small"].run.remote(x, label=label)
        return [await first, await second]

    async def race(self, x: float):
        pending = {asyncio.ensure_future(self._of(name, x)) for name in self.models}
        order = []
        for each in asyncio.as_completed(pending):
            order.append(await each)
        return order

    async def _of(self, name, x):
        await self.models[name].run.remote(x)
        return name


app = Route.bind(Classify.bind(), big=Scale.bind(2.0, delay=0.6), small=Scale.options(name="Small").bind(factor=0.5))
REQUESTS = []


def calls(handle):
    yield handle.remote(20).result()
    yield handle.remote(4).result()
    yield handle.race.remote(1).result()
