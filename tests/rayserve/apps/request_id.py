"""The request's id on its way through the deployments."""

import ray.serve.context
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


@serve.deployment
class Inner:
    def __call__(self):
        context = ray.serve.context._serve_request_context.get()
        return [context.request_id, context.route, context.app_name]


@serve.deployment
class Outer:
    def __init__(self, inner: DeploymentHandle):
        self.inner = inner

    async def __call__(self, request: Request):
        context = ray.serve.context._serve_request_context.get()
        return [context.request_id, request.headers["x-request-id"], await self.inner.remote()]


app = Outer.bind(Inner.bind())
REQUESTS = [{"path": "/", "headers": {"x-request-id": "abc-123"}}]
