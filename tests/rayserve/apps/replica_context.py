"""What a replica knows of itself."""

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


@serve.deployment(name="Renamed")
class Inner:
    def __init__(self):
        self.at_start = serve.get_replica_context().deployment

    def info(self):
        context = serve.get_replica_context()
        return [
            context.app_name,
            context.deployment,
            self.at_start,
            context.servable_object is self,
            isinstance(context.replica_tag, str),
            context.replica_id.unique_id == context.replica_tag,
            context.world_size,
            context.rank.rank,
        ]


@serve.deployment
class Outer:
    def __init__(self, inner: DeploymentHandle):
        self.inner = inner

    async def __call__(self, request: Request):
        context = serve.get_replica_context()
        return [context.app_name, context.deployment, await self.inner.info.remote(), self.inner.deployment_name]


app = Outer.bind(Inner.bind())
REQUESTS = [{"path": "/"}]


def calls(handle):
    try:
        serve.get_replica_context()
    except Exception as error:
        yield type(error).__name__
