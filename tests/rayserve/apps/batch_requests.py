"""@serve.batch over HTTP requests and over handle calls."""

from ray import serve
from starlette.requests import Request


@serve.deployment(max_ongoing_requests=20)
class Batcher:
    @serve.batch(max_batch_size=4, batch_wait_timeout_s=2.0)
    async def many(self, numbers: list[int]) -> list:
        return [{"number": number, "double": 2 * number, "batch": len(numbers)} for number in numbers]

    async def __call__(self, request: Request):
        return await self.many(int(request.query_params["n"]))

    async def direct(self, number: int):
        return await self.many(number)


app = Batcher.bind()
REQUESTS = [{"concurrent": [{"path": f"/?n={number}"} for number in range(4)]}]


def calls(handle):
    yield [response.result() for response in [handle.direct.remote(number) for number in range(8)]]
