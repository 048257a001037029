"""Multiplexed models with batches: no batch mixes models."""

from ray import serve


@serve.deployment(max_ongoing_requests=20)
class Both:
    @serve.multiplexed(max_num_models_per_replica=3)
    async def load(self, model_id: str):
        return f"model-{model_id}"

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=1.0)
    async def predict(self, items):
        model = await self.load(serve.get_multiplexed_model_id())
        return [(model, item, len(items)) for item in items]

    async def __call__(self, item):
        return await self.predict(item)


app = Both.bind()
REQUESTS = []


def calls(handle):
    responses = [handle.options(multiplexed_model_id="ab"[n % 2]).remote(n) for n in range(4)]
    yield [response.result() for response in responses]
