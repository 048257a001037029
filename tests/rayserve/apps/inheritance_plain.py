"""Deployments that share base classes and mixins."""

from abc import ABC, abstractmethod

from ray import serve
from starlette.requests import Request


class Mixin:
    def describe(self):
        return type(self).__name__ + "/" + self.kind


class Base(ABC):
    kind = "base"

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    @abstractmethod
    def compute(self, x: float) -> float: ...

    async def __call__(self, request: Request):
        return {"value": self.compute(float(request.query_params["x"])) * self.scale, "who": self.describe()}


@serve.deployment
class Square(Base, Mixin):
    kind = "square"

    def compute(self, x: float) -> float:
        return x * x


app = Square.options(name="SquareTwice").bind(scale=2.0)
REQUESTS = [{"path": "/?x=3"}, {"path": "/?x=a"}]


def calls(handle):
    yield handle.compute.remote(1.5).result()
    yield handle.describe.remote().result()
    yield handle.deployment_name
