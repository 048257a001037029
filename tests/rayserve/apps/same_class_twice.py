"""One class bound twice, and one bound object shared."""

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
class Model:
    def __init__(self, name: str):
        self.name = name
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return f"{self.name}{self.calls}:{x}"


@serve.deployment
class Both:
    def __init__(self, models: list[DeploymentHandle], named: dict, shared: DeploymentHandle):
        self.models = models
        self.named = named
        self.shared = shared

    async def __call__(self, x):
        found = [await model.remote(x) for model in self.models]
        found += [await self.named["inner"][0].remote(x), await self.shared.remote(x)]
        return found


shared = Model.bind("c")
app = Both.bind([Model.bind("a"), Model.bind("b")], {"inner": (shared,)}, shared=shared)
REQUESTS = []


def calls(handle):
    yield handle.remote("x").result()
    yield handle.remote("y").result()
