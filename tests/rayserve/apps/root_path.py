"""An application below a prefix: paths, redirects, url_for."""

from fastapi import FastAPI, Request
from ray import serve

web = FastAPI()

ROUTE_PREFIX = "/api/v2"


@serve.deployment
@serve.ingress(web)
class Ingress:
    @web.get("/")
    def root(self, request: Request):
        return [request.url.path, request.scope["root_path"]]

    @web.get("/items/{number}", name="item")
    def item(self, number: int, request: Request):
        return str(request.url_for("item", number=number + 1).path)


app = Ingress.bind()
REQUESTS = [
    {"path": "/api/v2/"},
    {"path": "/api/v2"},
    {"path": "/api/v2/items/1"},
    {"path": "/api/v2x"},
    {"path": "/"},
    {"path": "/api/v2/openapi.json"},
    {"path": "/-/routes"},
    {"path": "/-/healthz"},
]
