"""Responses passed on as arguments without waiting."""

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
class Add:
    def add(self, x: int, y: int = 1) -> int:
        return x + y


@serve.deployment
class Chain:
    def __init__(self, add: DeploymentHandle):
        self._add = add

    async def __call__(self, start: int) -> int:
        first = self._add.add.remote(start)
        second = self._add.add.remote(first, y=self._add.add.remote(10))
        return await self._add.add.remote(second)

    async def nested(self, start: int):
        first = self._add.add.remote(start)
        try:
            await self._add.add.remote([first])
        except Exception as error:
            return type(error).__name__
        return "no error"


app = Chain.bind(Add.bind())
REQUESTS = []


def calls(handle):
    yield handle.remote(1).result()
    yield handle.nested.remote(1).result(timeout_s=10)
