"""The application's lifespan and state."""

from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from ray import serve


@asynccontextmanager
async def lifespan(web):
    web.state.model = "loaded"
    yield


web = FastAPI(lifespan=lifespan)


@web.get("/model")
def model(request: Request):
    return request.app.state.model


@serve.deployment
@serve.ingress(web)
class Ingress:
    @web.get("/own")
    def own(self, request: Request):
        return request.app.state.model + "!"


app = Ingress.bind()
REQUESTS = [{"path": "/model"}, {"path": "/own"}]
