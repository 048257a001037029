"""A queue with a task of its own, begun in the constructor; locks and events there as well."""

import asyncio

from ray import serve


@serve.deployment(max_ongoing_requests=20)
class Queueing:
    def __init__(self, size: int):
        self.size = size
        self.queue = asyncio.Queue()
        self.lock = asyncio.Lock()
        self.worker = asyncio.create_task(self.work())

    async def work(self):
        while True:
            batch = [await self.queue.get()]
            while len(batch) < self.size:
                batch.append(await self.queue.get())
            for number, (value, future) in enumerate(batch):
                future.set_result((value * 10, number))

    async def __call__(self, value):
        future = asyncio.get_running_loop().create_future()
        async with self.lock:
            await self.queue.put((value, future))
        return (await future)[0]


app = Queueing.bind(3)
REQUESTS = []


def calls(handle):
    yield [response.result() for response in [handle.remote(n) for n in range(3)]]
