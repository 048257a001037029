"""Values and exceptions that cannot be pickled."""

import threading

from ray import serve
from ray.serve.handle import DeploymentHandle


class Held(Exception):
    def __init__(self):
        super().__init__("held")
        self.lock = threading.Lock()


@serve.deployment
class Inner:
    def lock(self):
        return threading.Lock()

    def held(self):
        raise Held

    def take(self, value):
        return "taken"


@serve.deployment
class Outer:
    def __init__(self, inner: DeploymentHandle):
        self.inner = inner

    async def of(self, kind):
        try:
            if kind == "argument":
                return await self.inner.take.remote(threading.Lock())
            return await getattr(self.inner, kind).remote()
        except TypeError as error:
            return ["TypeError", "pickle" in str(error)]
        except Exception as error:
            return [isinstance(error, Held), type(error).__name__ in ("RayTaskError", "RayTaskError(RayError)")]


app = Outer.bind(Inner.bind())
REQUESTS = []


def calls(handle):
    for kind in ("argument", "lock", "held"):
        yield handle.of.remote(kind).result()
    yield "taken" == handle.of.remote("argument").result()
