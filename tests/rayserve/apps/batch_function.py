"""@serve.batch on a function deployment's helper."""

from ray import serve
from starlette.requests import Request


@serve.batch(max_batch_size=2, batch_wait_timeout_s=1.0)
async def upper(texts):
    return [f"{text.upper()}-{len(texts)}" for text in texts]


@serve.deployment
async def shout(request: Request):
    return await upper(request.query_params["t"])


app = shout.bind()
REQUESTS = [{"concurrent": [{"path": "/?t=a"}, {"path": "/?t=b"}]}]
