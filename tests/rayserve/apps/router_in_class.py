"""Routes of a router, on methods of the class; the router is included before the ingress is made."""

from fastapi import APIRouter, Depends, FastAPI
from ray import serve

web = FastAPI()
router = APIRouter(prefix="/v2")


def page(limit: int = 10):
    return {"limit": limit}


class Api:
    def __init__(self):
        self.calls = 0

    @router.get("/items")
    def items(self, page: dict = Depends(page)):
        self.calls += 1
        return [self.calls, page]

    @web.get("/plain")
    async def plain(self):
        self.calls += 1
        return self.calls

    def helper(self):
        return "helper"


web.include_router(router)
Api = serve.deployment(serve.ingress(web)(Api))
app = Api.bind()
REQUESTS = [
    {"path": "/v2/items?limit=3"},
    {"path": "/plain"},
    {"path": "/v2/items"},
    {"path": "/items"},
    {"path": "/v2/items?limit=x"},
]


def calls(handle):
    yield handle.helper.remote().result()
