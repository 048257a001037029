"""A deployment that calls itself by name, and one that is handed over as a constructor's keyword in a nested dict."""

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment(max_ongoing_requests=20)
class Factorial:
    async def __call__(self, n: int) -> int:
        if n <= 1:
            return 1
        me = serve.get_deployment_handle("Factorial")
        return n * await me.remote(n - 1)


@serve.deployment
class Root:
    def __init__(self, config: dict):
        self.handles: dict[str, DeploymentHandle] = config["handles"]
        self.names = config["names"]

    async def __call__(self, n):
        return [await self.handles[name].remote(n) for name in self.names]


app = Root.bind({"handles": {"f": Factorial.bind()}, "names": ["f", "f"]})
REQUESTS = []


def calls(handle):
    yield handle.remote(6).result()
