"""A task that the constructor starts, and state between requests."""

import asyncio

from ray import serve


@serve.deployment
class Background:
    def __init__(self):
        self.ticks = 0
        self.task = asyncio.get_event_loop().create_task(self.tick())
        self.name = ""

    async def tick(self):
        while True:
            await asyncio.sleep(0.01)
            self.ticks += 1
            self.name = serve.get_replica_context().deployment

    async def __call__(self):
        while self.ticks < 3:
            await asyncio.sleep(0.01)
        return [self.ticks >= 3, self.name]


app = Background.bind()
REQUESTS = [{"path": "/"}]
