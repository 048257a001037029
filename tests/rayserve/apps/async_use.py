"""Handles in a coroutine outside of deployments, and in threads."""

import asyncio
import threading

from ray import serve


@serve.deployment(max_ongoing_requests=20)
class Model:
    async def __call__(self, x):
        await asyncio.sleep(0.01)
        return x + 1

    def stream(self, most):
        yield from range(most)


app = Model.bind()
REQUESTS = []


def calls(handle):
    async def main():
        found = await asyncio.gather(*(handle.remote(n) for n in range(5)))
        found.append(await asyncio.wait_for(handle.remote(10), timeout=20))
        found.append([item async for item in handle.options(stream=True).stream.remote(3)])
        response = handle.remote(1)
        try:
            response.result()
        except RuntimeError:
            found.append("RuntimeError")
        return found + [await response]

    yield asyncio.run(main())
    got = []
    threads = [threading.Thread(target=lambda n=n: got.append(handle.remote(n).result())) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield sorted(got)
