"""Local testing mode, and applications without HTTP."""

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
class Doubler:
    def double(self, s: str):
        return s + " " + s

    def fail(self):
        raise ValueError("as it is")


@serve.deployment
class HelloDeployment:
    def __init__(self, doubler: DeploymentHandle):
        self.doubler = doubler

    async def say_hello_twice(self, name: str):
        return await self.doubler.double.remote(f"Hello, {name}!")

    async def fail(self):
        await self.doubler.fail.remote()

    async def __call__(self):
        return await self.say_hello_twice("http")


app = HelloDeployment.bind(Doubler.bind())
REQUESTS = [{"path": "/"}]


def calls(handle):
    local = serve.run(app, name="local", _local_testing_mode=True)
    yield local.say_hello_twice.remote("Ray").result()
    try:
        local.fail.remote().result()
    except ValueError as error:
        yield [type(error).__name__, str(error)]
    silent = serve.run(app, name="silent", route_prefix=None)
    yield silent.say_hello_twice.remote("none").result()
    serve.delete("silent")
