"""A stream passed through three deployments."""

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
class Source:
    def __call__(self, most):
        for number in range(most):
            yield number


@serve.deployment
class Square:
    def __init__(self, source: DeploymentHandle):
        self.source = source.options(stream=True)

    async def __call__(self, most):
        async for number in self.source.remote(most):
            yield number * number


@serve.deployment
class Sum:
    def __init__(self, square: DeploymentHandle):
        self.square = square.options(stream=True)

    async def __call__(self, most):
        total = 0
        async for number in self.square.remote(most):
            total += number
        return total


app = Sum.bind(Square.bind(Source.bind()))
REQUESTS = []


def calls(handle):
    yield handle.remote(5).result()
    yield handle.remote(0).result()
