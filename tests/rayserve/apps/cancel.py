"""cancel() and timeouts of responses."""

import asyncio

from ray import serve
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentHandle


@serve.deployment(max_ongoing_requests=10)
class Slow:
    def __init__(self):
        self.cancelled = 0

    async def wait(self, seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "slept"

    def count(self):
        return self.cancelled


@serve.deployment
class Caller:
    def __init__(self, slow: DeploymentHandle):
        self.slow = slow

    async def cancel(self):
        response = self.slow.wait.remote(30)
        await asyncio.sleep(0.5)
        response.cancel()
        try:
            await response
        except RequestCancelledError:
            return "cancelled"

    async def count(self):
        return await self.slow.count.remote()

    async def late(self):
        response = self.slow.wait.remote(1)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(self._of(response))), 0.2)
        except asyncio.TimeoutError:
            return ["late", await response]

    async def _of(self, response):
        return await response


app = Caller.bind(Slow.bind())
REQUESTS = []


def calls(handle):
    import time

    yield handle.cancel.remote().result()
    deadline = time.time() + 10
    while handle.count.remote().result() < 1 and time.time() < deadline:
        time.sleep(0.05)
    yield handle.count.remote().result()
    yield handle.late.remote().result()
    response = handle.late.remote()
    try:
        response.result(timeout_s=0.05)
    except TimeoutError:
        yield "TimeoutError"
    yield response.result()
