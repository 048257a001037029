"""A function that gets Starlette's request."""

from ray import serve
from starlette.requests import Request


@serve.deployment
def hello(request: Request):
    return f"Hello {request.query_params.get('name', 'world')}!"


app = hello.bind()
REQUESTS = [{"path": "/"}, {"path": "/?name=Ada"}, {"path": "/any/path?name=x"}, {"method": "POST", "path": "/"}]
