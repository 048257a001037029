"""batch_size_fn counts the batch's own size."""

import asyncio

from ray import serve


@serve.deployment(max_ongoing_requests=20)
class Sized:
    @serve.batch(max_batch_size=10, batch_wait_timeout_s=0.3, batch_size_fn=lambda items: sum(len(i) for i in items))
    async def sizes(self, items):
        return [[len(item), len(items)] for item in items]

    async def run(self, lengths):
        found = await asyncio.gather(*(self.sizes("x" * length) for length in lengths), return_exceptions=True)
        return [each if isinstance(each, list) else type(each).__name__ for each in found]


app = Sized.bind()
REQUESTS = []


def calls(handle):
    yield handle.run.remote([3, 3, 3]).result()
    yield handle.run.remote([11]).result()
    yield handle.run.remote([4, 6]).result()
