"""What a plain handler sees of its request."""

from ray import serve
from starlette.requests import Request


@serve.deployment
async def echo(request: Request):
    form = {}
    if "form" in request.headers.get("content-type", ""):
        form = (await request.body()).decode()
    return {
        "method": request.method,
        "path": request.url.path,
        "query": sorted(request.query_params.multi_items()),
        "header": request.headers.get("x-own"),
        "cookie": request.cookies,
        "id": request.headers.get("x-request-id"),
        "body": (await request.body()).decode() if not form else form,
    }


app = echo.bind()
REQUESTS = [
    {"path": "/a/b?x=1&x=2&y=%20", "headers": {"x-own": "mine", "cookie": "k=v", "x-request-id": "r-1"}},
    {"method": "PUT", "path": "/p", "body": "raw body", "headers": {"x-request-id": "r-2"}},
    {
        "method": "POST",
        "path": "/f",
        "body": "a=1&b=2",
        "headers": {"content-type": "application/x-www-form-urlencoded", "x-request-id": "r-3"},
    },
    {"method": "DELETE", "path": "/d", "headers": {"x-request-id": "r-4"}},
    {"method": "PATCH", "path": "/d", "body": "x", "headers": {"x-request-id": "r-5"}},
    {"method": "HEAD", "path": "/h", "headers": {"x-request-id": "r-6"}},
    {"method": "OPTIONS", "path": "/o", "headers": {"x-request-id": "r-7"}},
]
