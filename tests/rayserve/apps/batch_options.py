"""Batches by timeout, several arguments, setters, an error, a wrong length."""

import asyncio

from ray import serve


@serve.deployment(max_ongoing_requests=20)
class Batcher:
    @serve.batch(max_batch_size=10, batch_wait_timeout_s=0.3)
    async def pairs(self, left: list[int], right: list[int]):
        return [(a + b, len(left)) for a, b in zip(left, right)]

    @serve.batch
    async def failing(self, items):
        if "bad" in items:
            raise ValueError("bad item")
        return items

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=0.2)
    async def short(self, items):
        return items[:-1]

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.3)
    async def optional(self, items, scale=None):
        return items

    async def three(self):
        return await asyncio.gather(*(self.pairs(number, right=10) for number in range(3)))

    async def fail(self):
        found = await asyncio.gather(self.failing("good"), self.failing("bad"), return_exceptions=True)
        return [type(each).__name__ for each in found]

    async def wrong(self):
        try:
            await self.short("x")
        except Exception as error:
            return type(error).__name__

    async def mixed(self):
        found = await asyncio.gather(self.optional(1), self.optional(2, scale=3), return_exceptions=True)
        return [repr(each) for each in found]

    async def change(self):
        self.pairs.set_max_batch_size(2)
        self.pairs.set_batch_wait_timeout_s(0.1)
        return [self.pairs._get_max_batch_size(), await asyncio.gather(*(self.pairs(n, n) for n in range(4)))]


app = Batcher.bind()
REQUESTS = []


def calls(handle):
    yield handle.three.remote().result()
    yield handle.fail.remote().result()
    yield handle.wrong.remote().result()
    yield handle.mixed.remote().result()
    yield handle.change.remote().result()
