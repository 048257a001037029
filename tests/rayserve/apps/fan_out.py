"""Many calls at once, of which some fail."""

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment(max_ongoing_requests=3)
class Worker:
    async def work(self, number):
        await asyncio.sleep(0.01)
        if number % 5 == 4:
            raise ValueError(number)
        return number * number


@serve.deployment
class Ingress:
    def __init__(self, worker: DeploymentHandle):
        self.worker = worker

    async def __call__(self):
        found = await asyncio.gather(*(self.worker.work.remote(n) for n in range(20)), return_exceptions=True)
        return [each if isinstance(each, int) else isinstance(each, ValueError) for each in found]


app = Ingress.bind(Worker.bind())
REQUESTS = [{"path": "/"}]
