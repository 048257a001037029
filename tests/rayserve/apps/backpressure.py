"""max_queued_requests: further calls are refused."""

import time

from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle


@serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
class Slow:
    def __call__(self, seconds):
        time.sleep(seconds)
        return "done"


@serve.deployment(max_ongoing_requests=20)
class Caller:
    def __init__(self, slow: DeploymentHandle):
        self.slow = slow

    async def __call__(self):
        import asyncio

        first = self.slow.remote(1.5)
        await asyncio.sleep(0.5)
        others = [self.slow.remote(0) for _ in range(4)]
        found = []
        for each in [first, *others]:
            try:
                found.append(await each)
            except BackPressureError as error:
                found.append(f"refused: {error.message}")
        return [found.count("done"), sorted({each for each in found if each != "done"})]


app = Caller.bind(Slow.bind())
REQUESTS = [{"path": "/"}]
