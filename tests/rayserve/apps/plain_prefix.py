"""A plain handler below a prefix."""

from ray import serve
from starlette.requests import Request

ROUTE_PREFIX = "/plain"


@serve.deployment
def handler(request: Request):
    return [request.url.path, request.scope.get("root_path"), request.scope["path"]]


app = handler.bind()
REQUESTS = [{"path": "/plain"}, {"path": "/plain/"}, {"path": "/plain/deep?x=1"}, {"path": "/other"}]
