"""A Starlette application as ingress."""

from ray import serve
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route


async def home(request):
    return PlainTextResponse(f"home {request.path_params}")


async def user(request):
    return PlainTextResponse(f"user {request.path_params['name']}")


web = Starlette(routes=[Route("/", home), Mount("/users", routes=[Route("/{name}", user)])])


@serve.deployment
@serve.ingress(web)
class Ingress:
    pass


app = Ingress.bind()
REQUESTS = [{"path": "/"}, {"path": "/users/ada"}, {"path": "/users/"}, {"method": "POST", "path": "/"}]
