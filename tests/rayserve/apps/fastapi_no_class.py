"""serve.ingress(app)() without a class."""

from fastapi import FastAPI
from ray import serve

web = FastAPI()


@web.get("/hi")
def say_hi():
    return "Hello world!"


app = serve.deployment(serve.ingress(web)()).bind()
REQUESTS = [{"path": "/hi"}, {"path": "/ho"}]
