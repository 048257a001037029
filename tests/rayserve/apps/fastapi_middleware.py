"""Middleware, exception handlers, routers, cookies, background tasks."""

import asyncio

from fastapi import APIRouter, BackgroundTasks, FastAPI, Response
from fastapi.responses import JSONResponse
from ray import serve


class Odd(Exception):
    pass


web = FastAPI()
router = APIRouter(prefix="/v1", tags=["v1"])


@router.get("/ping")
async def ping():
    return "pong"


web.include_router(router)


@web.middleware("http")
async def stamp(request, call_next):
    response = await call_next(request)
    response.headers["x-stamp"] = "stamped"
    return response


@web.exception_handler(Odd)
async def on_odd(request, error):
    return JSONResponse({"odd": str(error)}, status_code=409)


@serve.deployment
@serve.ingress(web)
class Ingress:
    def __init__(self):
        self.done = []

    @web.get("/odd")
    def odd(self):
        raise Odd("strange")

    @web.get("/cookie")
    def cookie(self, response: Response):
        response.set_cookie("seen", "1")
        return "ok"

    @web.post("/later")
    async def later(self, tasks: BackgroundTasks):
        tasks.add_task(self.done.append, 1)
        return len(self.done)

    @web.get("/done")
    async def count(self):
        while not self.done:
            await asyncio.sleep(0.01)
        return len(self.done)

    @web.get("/broken")
    def broken(self):
        raise RuntimeError("broken")


app = Ingress.bind()
REQUESTS = [
    {"path": "/v1/ping"},
    {"path": "/odd"},
    {"path": "/cookie"},
    {"method": "POST", "path": "/later"},
    {"path": "/done"},
    {"path": "/broken"},
]
