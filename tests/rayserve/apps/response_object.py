"""Properties of responses, and uses that are refused."""

from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator


@serve.deployment
class Inner:
    def __call__(self, x=1):
        return x

    def many(self):
        yield 1


@serve.deployment
class Outer:
    def __init__(self, inner: DeploymentHandle):
        self.inner = inner

    async def __call__(self):
        response = self.inner.remote()
        found = [isinstance(response, DeploymentResponse), isinstance(response.request_id, str), response.cancelled()]
        try:
            response.result()
        except RuntimeError:
            found.append("RuntimeError")
        found += [await response, await response]
        stream = self.inner.options(stream=True).many.remote()
        found.append(isinstance(stream, DeploymentResponseGenerator))
        try:
            await stream
        except TypeError:
            found.append("TypeError")
        try:
            await self.inner.remote(stream)
        except Exception as error:
            found.append(type(error).__name__)
        found.append([item async for item in stream])
        return found


app = Outer.bind(Inner.bind())
REQUESTS = [{"path": "/"}]
