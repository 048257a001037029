"""Loads that fail, loads at the same time, and wrong uses of the decorator."""

import asyncio

from ray import serve


@serve.deployment(max_ongoing_requests=20)
class Models:
    def __init__(self):
        self.loads = []
        self.fail = True

    @serve.multiplexed(max_num_models_per_replica=2)
    async def load(self, model_id: str):
        self.loads.append(model_id)
        await asyncio.sleep(0.05)
        if model_id == "bad" and self.fail:
            self.fail = False
            raise OSError("no such model")
        return model_id.upper()

    async def __call__(self, x):
        try:
            return [await self.load(serve.get_multiplexed_model_id()), x]
        except OSError as error:
            return ["failed", str(error)]

    def seen(self):
        return self.loads


app = Models.bind()
REQUESTS = []


def calls(handle):
    bad = handle.options(multiplexed_model_id="bad")
    yield bad.remote(1).result()
    yield bad.remote(2).result()
    good = handle.options(multiplexed_model_id="good")
    yield [response.result() for response in [good.remote(n) for n in range(4)]]
    yield handle.seen.remote().result()

    def decorate(function):
        try:
            serve.multiplexed(function)
            return "fine"
        except TypeError:
            return "TypeError"

    def plain(model_id):
        return model_id

    yield decorate(plain)
    for number in (0, -1, "3"):
        try:
            serve.multiplexed(max_num_models_per_replica=number)
            yield "fine"
        except (ValueError, TypeError) as error:
            yield type(error).__name__
