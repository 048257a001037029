"""Less usual uses of handles, and errors that cannot be taken apart."""

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle


class WithCode(Exception):
    def __init__(self, *, code):
        super().__init__()
        self.code = code


@serve.deployment
class Model:
    def __init__(self):
        self.was_known = serve.get_replica_context().servable_object is self

    async def __call__(self, x):
        return x + 1

    async def sleep(self):
        await asyncio.sleep(2)

    async def future(self):
        return asyncio.get_running_loop().create_future()

    async def known(self):
        return [self.was_known, serve.get_replica_context().servable_object is self]

    def unreadable(self):
        raise WithCode(code=3)

    def ends(self):
        raise StopIteration


@serve.deployment
class Front:
    def __init__(self, model: DeploymentHandle):
        self.model = model

    async def dunder(self):
        return await self.model.__call__.remote(1)

    async def unreadable(self):
        await self.model.unreadable.remote()


app = Front.bind(Model.bind())
REQUESTS = []


def calls(handle):
    model = serve.get_deployment_handle("Model", app_name="default")
    yield [model.__call__.remote(4).result(), handle.dunder.remote().result()]
    try:
        model.sleep.remote().result(timeout_s=0.5)
    except TimeoutError as error:
        yield type(error).__name__ in ("TimeoutError", "GetTimeoutError")
    yield model.known.remote().result()
    for wrong in (
        lambda: serve.get_deployment_handle("Nothing", app_name="default"),
        lambda: model.ends.remote().result(),
        lambda: model.unreadable.remote().result(),
        lambda: handle.unreadable.remote().result(),
        lambda: model.future.remote().result(),
    ):
        try:
            wrong()
        except Exception as error:
            yield [type(error).__name__, "WithCode" in str(error), "StopIteration" in str(error)]
