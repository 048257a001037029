"""Many models in one replica, by header and by handle option."""

from ray import serve
from starlette.requests import Request


@serve.deployment
class Models:
    def __init__(self):
        self.loads = []

    @serve.multiplexed(max_num_models_per_replica=2)
    async def get_model(self, model_id: str):
        self.loads.append(model_id)
        return lambda text: f"{model_id}:{text}"

    async def __call__(self, request: Request):
        model_id = serve.get_multiplexed_model_id()
        if not model_id:
            return "no model"
        model = await self.get_model(model_id)
        return [model(request.query_params.get("t", "")), list(self.loads)]

    async def predict(self, text):
        model = await self.get_model(serve.get_multiplexed_model_id())
        return [model(text), list(self.loads)]

    async def empty(self):
        try:
            await self.get_model("")
        except ValueError:
            return "ValueError"


app = Models.bind()
REQUESTS = [
    {"path": "/"},
    {"path": "/?t=x", "headers": {"serve_multiplexed_model_id": "m1"}},
    {"path": "/?t=y", "headers": {"serve_multiplexed_model_id": "m2"}},
    {"path": "/?t=z", "headers": {"serve-multiplexed-model-id": "m1"}},
    {"path": "/?t=w", "headers": {"serve_multiplexed_model_id": "m3"}},
    {"path": "/?t=v", "headers": {"serve_multiplexed_model_id": "m1"}},
    {"path": "/?t=u", "headers": {"serve_multiplexed_model_id": "m2"}},
]


def calls(handle):
    yield handle.options(multiplexed_model_id="h1").predict.remote("t").result()
    yield handle.predict.options(multiplexed_model_id="h1").remote("t").result()
    yield handle.empty.remote().result()
