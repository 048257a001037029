"""A handle passed as an argument, and from a helper object."""

from ray import serve
from ray.serve.handle import DeploymentHandle


class Helper:
    def __init__(self, handle):
        self.handle = handle

    async def ask(self, x):
        return await self.handle.options(method_name="double").remote(x)


@serve.deployment
class Double:
    def double(self, x):
        return 2 * x


@serve.deployment
class Middle:
    async def use(self, handle: DeploymentHandle, x):
        return await handle.double.remote(x)


@serve.deployment
class Ingress:
    def __init__(self, double, middle):
        self.helper = Helper(double)
        self.double = double
        self.middle = middle

    async def __call__(self):
        return [await self.helper.ask(4), await self.middle.use.remote(self.double, 5)]


app = Ingress.bind(Double.bind(), Middle.bind())
REQUESTS = [{"path": "/"}]
