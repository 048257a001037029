"""Two batches at a time, and a batch of one that waits for nobody."""

import asyncio

from ray import serve


@serve.deployment(max_ongoing_requests=32)
class Batches:
    def __init__(self):
        self.running = 0
        self.most = 0

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.2, max_concurrent_batches=2)
    async def two(self, items):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.3)
        self.running -= 1
        return [(item, len(items)) for item in items]

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0)
    async def single(self, items):
        return [len(items)] * len(items)

    async def run(self):
        found = await asyncio.gather(*(self.two(n) for n in range(8)))
        return [sorted(found), self.most, await asyncio.gather(*(self.single(n) for n in range(3)))]

    async def cancelled(self):
        first, second = asyncio.ensure_future(self.two("a")), asyncio.ensure_future(self.two("b"))
        await asyncio.sleep(0)
        first.cancel()
        return [await second, first.cancelled()]


app = Batches.bind()
REQUESTS = []


def calls(handle):
    yield handle.run.remote().result()
    yield handle.cancelled.remote().result()
